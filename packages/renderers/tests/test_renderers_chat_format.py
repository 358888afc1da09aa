"""Which format a model speaks is read off its chat template; what a server must know about a format is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_renderers import ChatFormat, RendererConfig, detect_reasoning_format, detect_tool_format, fold_events
from quire_renderers.format_names import REASONING_ALIASES, TOOL_ALIASES
from quire_renderers.format_states import Expect, FormatTable, Sink, Until
from quire_renderers.tool_formats import TOOL_FORMATS

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())

# Lines that tell templates apart, written in the manner of the models' own.
TEMPLATES = {
    ("hermes", "qwen3"): "{{ '<tool_call>\\n{\"name\": ' }}{{ content.split('</think>')[-1] }}<|im_start|>",
    ("qwen3_coder", "qwen3"): "<tool_call>\n<function=example>\n<parameter=p>\n</think>",
    ("qwen3_coder", "nemotron_v3"): "<tool_call>\n<function=x>\n<parameter=p> {{ truncate_history_thinking }}</think>",
    ("llama3_json", None): '<|start_header_id|>system ... {"name": function name, "parameters": ...}',
    ("llama4_pythonic", None): "<|header_start|>assistant<|header_end|>",
    ("mistral", "mistral"): "[AVAILABLE_TOOLS][TOOL_CALLS] [THINK]",
    ("mistral", None): "[AVAILABLE_TOOLS]{{ '[TOOL_CALLS] [' }}",
    ("deepseek_v3", "deepseek_r1"): "<｜Assistant｜><think>\\n <｜tool▁calls▁begin｜><｜tool▁sep｜>```json",
    ("deepseek_v31", "deepseek_v3"): "<｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁sep｜>",
    ("deepseek_v32", "deepseek_v3"): "<｜DSML｜function_calls><｜Assistant｜><think>",
    ("glm45", "glm45"): "<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key> </think>",
    ("kimi_k2", None): "<|tool_calls_section_begin|>",
    ("kimi_k2", "kimi_k2"): "<|tool_calls_section_begin|><think></think>",
    ("minimax_m2", "minimax_m2"): "<minimax:tool_call>{{ '<think>' }}",
    ("granite", "granite"): "<|start_of_role|> <|tool_call|> Here is my thought process:",
    ("internlm", None): "<|action_start|><|plugin|>",
    ("phi4_mini", None): "<|system|>{{ '<|tool|>' + tools + '<|/tool|>' }}",
    ("gpt_oss", "gpt_oss"): "<|start|>assistant<|channel|>final<|message|>",
    ("olmo3", "olmo3"): "<function_calls></function_calls><think>",
    ("seed_oss", "seed_oss"): "<seed:tool_call><seed:think>",
    ("step3", "step3"): "<steptml:invoke></think>",
    ("jamba", None): "<tool_calls>",
    ("jamba", "hunyuan_a13b"): "<tool_calls>{{ '</think>\\n<answer>\\n' }}",
    ("minimax_m1", None): "<beginning_of_sentence>ai name=assistant <tool_calls>",
    ("hy_v3", "hy_v3"): "<tool_calls:opensource><tool_call:opensource>{{ n }}<tool_sep:opensource><think:opensource>",
    ("cohere_command4", "cohere_command4"): "<|START_THINKING|><|END_THINKING|><|START_TEXT|><|START_ACTION|>",
    ("cohere_command4", "cohere_command3"): "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|START_ACTION|>",
    ("apertus", "apertus"): "<|inner_prefix|><|tools_prefix|>[",
    ("deepseek_v4", "deepseek_v3"): "<｜DSML｜tool_calls><｜Assistant｜><think>",
    ("deepseek_v41", "deepseek_v3"): "<｜DSML｜ calls><｜Assistant｜><think>",
    ("gigachat3", None): "function call<|role_sep|>",
    ("gigachat35", "qwen3"): "<｜GCML｜tool_calls> <think></think>",
    ("gemma4", "gemma4"): "<|tool_call>call:{{ name }} <|channel>thought",
    ("lfm2", None): "<|tool_list_start|>",
    ("plamo3", "plamo3"): "<|plamo:begin_tool_requests:plamo|><|plamo:begin_think:plamo|>",
    ("granite_20b_fc", None): "<function_call> {{ call }}",
    ("dots", "qwen3"): "<dots_function_call><think></think>",
    ("longcat", "qwen3"): "<longcat_tool_call></think>",
    ("k2_horizon", "k2_horizon"): "<ifm|tool_calls><ifm|think_fast>",
    ("iquest_q1", "glm45"): "<iquest_tool_call><arg_key></think>",
    ("solar_open2", "solar_open2"): "<|think:start|><|tool_call:start|>",
    ("minicpm5", "qwen3"): '<function name="f"><param name="p"></param></function></think>',
    ("kimi_k3", "kimi_k3"): "<|open|>think<|sep|><|open|>tools<|sep|>",
    ("minimax_m3", "minimax_m3"): "]<]minimax[>[<tool_call><mm:think>",
    ("inkling", "inkling"): "<|message_model|><|content_thinking|><|content_invoke_tool_json|>",
    ("muse", "muse"): "<|start|>assistant to=self<|message|><|eom|><atem:function_calls>",
    ("hermes", "ernie45"): "<tool_call>\n{}\n</tool_call></think><response>",
    ("functiongemma", None): "<start_function_declaration>",
    (None, None): "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize(("names", "template"), TEMPLATES.items(), ids=str)
def test_formats_are_recognised(names, template):
    assert (detect_tool_format(template), detect_reasoning_format(template)) == names
    form = ChatFormat(chat_template=template)
    assert (form.tool_parser, form.reasoning_parser) == names


@pytest.mark.parametrize("alias", TOOL_ALIASES)
def test_other_names_are_known(alias):
    assert ChatFormat(tool_parser=alias, reasoning_parser="none").tool_parser == TOOL_ALIASES[alias]
    assert RendererConfig(tool_call_parser=alias).tool_call_parser == alias


@pytest.mark.parametrize("alias", REASONING_ALIASES)
def test_other_names_of_thinking_are_known(alias):
    assert ChatFormat(reasoning_parser=alias).reasoning_parser == REASONING_ALIASES[alias]
    assert RendererConfig(reasoning_parser=alias).reasoning_parser == alias


def test_unknown_names_are_refused_with_the_choices():
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=rf"{field} must be one of auto, none, .*got 'gpt-5'"):
            RendererConfig(**{field: "gpt-5"})
    with pytest.raises(ConfigError, match="tool_call_parser must be one of"):
        ChatFormat(tool_parser="gpt-5")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_forced_call_is_the_beginning_of_one(name):
    """What a server puts before the answer parses as a call when JSON arguments, or the format's own, follow."""
    form = ChatFormat(tool_parser=name, reasoning_parser="none")
    start = form.forced_call("get_weather")
    assert start.startswith(form.forced_call(None))
    grammar = form.call_grammar(TOOLS)
    if grammar is None and not (form.tools.thinks and form.tools.suffix):
        return
    rest = '{"city": "Paris"}' + form.tools.suffix
    parser = form.parser(TOOLS)
    message = fold_events([*parser.feed(start), *parser.feed(rest), *parser.finish()])
    (call,) = message.calls
    assert (call.name, json.loads(call.arguments), call.complete) == ("get_weather", {"city": "Paris"}, True)
    assert message.text == ""
    if grammar is not None:
        assert grammar[0]["begin"] == start
        assert grammar[0]["begin"].startswith(form.tools.trigger)
        assert grammar[0]["schema"] == TOOLS[0]["function"]["parameters"]


def test_special_tokens_that_are_markers_must_stay_and_others_are_dropped():
    form = ChatFormat(tool_parser="mistral", reasoning_parser="none", special_tokens=["[TOOL_CALLS]", "<s>", "</s>"])
    assert form.keeps_special_tokens(tools=True)
    assert not form.keeps_special_tokens(tools=False)
    text = '<s>Hi</s>[TOOL_CALLS]now<s>{"a": "</s>"}</s>'
    parser = form.parser(TOOLS)
    message = fold_events([event for char in text for event in parser.feed(char)] + parser.finish())
    assert (message.text, message.calls[0].name, message.calls[0].arguments) == ("Hi", "now", '{"a": ""}')
    shown = form.parser(TOOLS, skip_special_tokens=False)
    assert fold_events([*shown.feed(text), *shown.finish()]).text.startswith("<s>Hi</s>")


def test_hermes_markers_are_ordinary_tokens():
    form = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3", special_tokens=["<|im_end|>"])
    assert not form.keeps_special_tokens(tools=True)


@pytest.mark.parametrize(
    ("prompt", "continued", "kwargs", "opened"),
    [
        ("<|im_start|>assistant\n", None, None, False),
        ("<|im_start|>assistant\n<think>\n", None, None, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, None, False),
        ("user: what is <think>?\nassistant:", None, None, False),
        ("assistant: <think>a", "<think>a", None, True),
        ("assistant: <think>a</think>b", "<think>a</think>b", None, False),
    ],
)
def test_the_prompt_says_whether_thinking_is_open(prompt, continued, kwargs, opened):
    form = ChatFormat(reasoning_parser="qwen3")
    assert form.opens_thinking(prompt, continued, kwargs) is opened


def test_ids_have_the_form_the_templates_take():
    assert ChatFormat(tool_parser="mistral").new_call_id().isalnum()
    assert len(ChatFormat(tool_parser="mistral").new_call_id()) == 9
    ids = {ChatFormat(tool_parser="hermes").new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(each.startswith("call_") for each in ids)


def test_a_table_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="does not have"):
        FormatTable({"content": Until(Sink.CONTENT, {"<a>": "nowhere"})}, start="content")
    with pytest.raises(ConfigError, match="begins"):
        FormatTable({"content": Until(Sink.CONTENT, {"<a>": "content", "<a><b>": "content"})}, start="content")
    with pytest.raises(ConfigError, match="white space"):
        FormatTable({"content": Until(Sink.CONTENT), "x": Expect({"\n": "content"})}, start="content")
    with pytest.raises(ConfigError, match="recover"):
        FormatTable({"x": Expect({}, otherwise="x")}, start="x", recover="x")
