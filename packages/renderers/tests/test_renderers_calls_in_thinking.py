"""Calls inside the thinking, and thinking that only speaks of them: every tool format with every reasoning format."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from quire_renderers import CallStart, ChatFormat, fold_events, merge_events
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_formats import TOOL_FORMATS

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())
TOOL_NAMES = [name for name, form in TOOL_FORMATS.items() if not form.thinks]
REASONING_NAMES = [name for name, form in REASONING_FORMATS.items() if form.needs_table is None and form.start]
# Every tool format with two reasoning formats that differ in all that they may, every reasoning format with two tool
# formats, and those of one model.
EVERY_PAIR = [
    pytest.param(tool, reasoning)
    for tool in TOOL_NAMES
    for reasoning in REASONING_NAMES
    if tool in ("hermes", "qwen3_coder") or reasoning in ("qwen3", "kimi_k3") or tool == reasoning
]
TAGGED = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"


def calls_of(tool):
    """Golden outputs that are calls from beginning to end."""
    for case in json.loads((GOLDEN / f"{tool}.json").read_text()):
        if case["calls"] and not case["text"] and not case["reasoning"]:
            yield case["output"], [(call["name"], call["arguments"], True) for call in case["calls"]]


def parse(form, text, **arguments):
    """(calls, reasoning, text), the same whole and letter by letter."""
    whole, cut = form.parser(TOOLS, **arguments), form.parser(TOOLS, **arguments)
    events = merge_events([*whole.feed(text), *whole.finish()])
    assert merge_events([*(event for char in text for event in cut.feed(char)), *cut.finish()]) == events
    message = fold_events(events)
    calls = [(call.name, json.loads(call.arguments), call.complete) for call in message.calls]
    return calls, message.reasoning, message.text


@pytest.mark.parametrize(("tool", "reasoning"), EVERY_PAIR)
def test_a_call_is_one_and_what_stood_before_it_is_reasoning(tool, reasoning):
    form = ChatFormat(tool_parser=tool, reasoning_parser=reasoning)
    start = form.thinking_start()
    for output, calls in calls_of(tool):
        assert parse(form, f"{start}\nI look.\n{output}") == (calls, "I look.", "")
        assert parse(form, f"\nI look.\n{output}", prompt=start) == (calls, "I look.", "")
        assert parse(form, output, prompt=start) == (calls, "", "")


@pytest.mark.parametrize(("tool", "reasoning"), EVERY_PAIR)
def test_what_follows_a_call(tool, reasoning):
    """Until the thinking ends it is reasoning; where nothing ends it, the call did."""
    form = ChatFormat(tool_parser=tool, reasoning_parser=reasoning)
    start, end = form.thinking_start(), form.thinking_end()
    for output, calls in calls_of(tool):
        thinking = f"{start}\nI look.\n{output}"
        assert parse(form, f"{thinking}\n{end}\n\nDone.") == (calls, "I look.", "Done.")
        assert parse(form, f"{thinking}\nSo it is.{end}Done.") == (calls, "I look.So it is.", "Done.")
        assert parse(form, f"{thinking}\nDone.") == (calls, "I look.", "Done.")


@pytest.mark.parametrize(("tool", "reasoning"), EVERY_PAIR)
def test_what_only_speaks_of_markers_stays_thinking(tool, reasoning):
    form = ChatFormat(tool_parser=tool, reasoning_parser=reasoning)
    start, end = form.thinking_start(), form.thinking_end()
    for marker in TOOL_FORMATS[tool].content:
        for thought in (
            f"I could use {marker} here, or not.",
            f"I could use {marker}",
            f"{marker}",
            f"It is `{marker}`, or “{end}”.",
            f'{marker} and "{marker}" and {end[:-1]} too',
            f"{marker}{marker} {marker}\n{marker}",
        ):
            assert parse(form, f"{start}{thought}{end}Answer") == ([], thought, "Answer")
            assert parse(form, f"{start}{thought}") == ([], thought, "")


@pytest.mark.parametrize(("tool", "reasoning"), EVERY_PAIR)
def test_a_call_that_the_thinking_ends_in_was_none(tool, reasoning):
    form = ChatFormat(tool_parser=tool, reasoning_parser=reasoning)
    start, end = form.thinking_start(), form.thinking_end()
    for output, _ in calls_of(tool):
        if end in output:
            continue  # in an argument, where it would end the thinking if the call were none
        for cut in (output[: len(output) // 2], output[: len(output) // 3]):
            calls, reasoning_text, text = parse(form, f"{start}I look.\n{cut}{end}Answer")
            if not calls:  # else one of several was whole
                assert (reasoning_text, text) == (f"I look.\n{cut.rstrip()}", "Answer")
            assert all(complete for _, _, complete in calls)
            assert text == "Answer"


@pytest.mark.parametrize(
    ("text", "calls", "reasoning", "answer"),
    [
        ("a\n" + TAGGED.format("{}"), ["{}"], "a", ""),
        ("a " + TAGGED.format("x </think> y") + " b</think>c", ["x </think> y"], "ab", "c"),
        ("`" + TAGGED.format("x") + "` is how</think>c", [], "`" + TAGGED.format("x") + "` is how", "c"),
        ("a" + TAGGED.format(1) + "b" + TAGGED.format(2) + "c", ["1", "2"], "ab", "c"),
        ("a" + TAGGED.format(1) + "b</think>c" + TAGGED.format(2), ["1", "2"], "ab", "c"),
        ("a" + TAGGED.format(1) + "b <tool_call> c</think>d", ["1"], "ab <tool_call> c", "d"),
        ("<function=now><parameter=x>1</function> so</think>c", [], "<function=now><parameter=x>1</function> so", "c"),
        ("`</think>` ends it: '</think>'.</think>c", [], "`</think>` ends it: '</think>'.", "c"),
        ("is it `x`</think>`y`", [], "is it `x`", "`y`"),
        ("使用`</think>`标签</think>c", [], "使用`</think>`标签", "c"),
        ("the `end</think>c", [], "the `end", "c"),
        ("`</think>", [], "`", ""),
        ("<tool_call>\n<function=>\n</tool_call></think>c", [], "<tool_call>\n<function=>\n</tool_call>", "c"),
    ],
)  # fmt: skip
def test_thinking_with_tagged_calls(text, calls, reasoning, answer):
    form = ChatFormat(tool_parser="qwen3_coder", reasoning_parser="qwen3")
    found = [("get_weather", {"city": city}, True) for city in calls]
    assert parse(form, "<think>" + text) == (found, reasoning, answer)


@pytest.mark.parametrize("tool", ["hermes", "granite", "jamba", "xlam"])
def test_malformed_calls_stay_thinking(tool):
    form = ChatFormat(tool_parser=tool, reasoning_parser="qwen3")
    marker = next(iter(form.tools.content))
    for broken in (
        '{"name": "get_weather", "arguments": {...}}',
        '{"name": "get_weather", "arguments": {"city": Paris}}',
        '{"name": "", "arguments": {}}',
        '{"name": "two words", "arguments": {}}',
        '{"name": "now", "name": "now"}',
        '{"arguments": {"city": "Paris"}}',
        '[{"name": "get_weather", "arguments": {"city": 1,,}}]',
        '{"name": <function-name>, "arguments": <args-json-object>}',
    ):
        thought = f"They look so: {marker}{broken} or so."
        assert parse(form, f"<think>{thought}</think>Answer") == ([], thought, "Answer")
        assert parse(form, f"<think>{thought}") == ([], thought, "")


def test_a_call_that_the_output_ends_in_was_cut_short():
    form = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3")
    text = '<think>a\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    assert parse(form, text) == ([("get_weather", {"city": "Par"}, False)], "a", "")
    assert parse(form, text[: text.index("arguments")]) == ([], text[len("<think>") : text.index("arguments")], "")


@pytest.mark.parametrize(
    ("text", "calls", "reasoning", "answer"),
    [
        ("so <|channel|> is.<|end|><|start|>assistant<|channel|>final<|message|>c", [], "so <|channel|> is.", "c"),
        ("a<|channel|>commentary to=functions.now<|message|>{}<|call|>", [("now", {}, True)], "a", ""),
        ("a<|start|>assistant<|channel|>final<|message|>c", [], "a", "c"),
        ("<|start|>assistant x<|end|><|start|>assistant<|channel|>final<|message|>c", [], "<|start|>assistant x", "c"),
    ],
)  # fmt: skip
def test_harmony(text, calls, reasoning, answer):
    form = ChatFormat(tool_parser="gpt_oss", reasoning_parser="gpt_oss")
    assert parse(form, "<|channel|>analysis<|message|>" + text) == (calls, reasoning, answer)


def test_nothing_of_a_call_is_given_out_before_it_is_one():
    form = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3")
    parser = form.parser(TOOLS)
    assert fold_events(parser.feed("<think>I look.\n<tool_call>\n")).reasoning == "I look."
    assert parser.feed('{"name": "get_weather", "arguments": {"city": "Paris"') == []
    assert parser.num_calls <= 1
    assert isinstance(parser.feed("}}")[0], CallStart)
    assert not parser.feed("</tool_call>")
    assert not parser.feed("More.")  # the answer, or reasoning
    assert parser.is_thinking
    assert fold_events(parser.feed("</think>")).reasoning == "More."
    assert not parser.is_thinking


def test_a_thinking_full_of_calls_that_are_none_takes_time_in_proportion():
    form = ChatFormat(tool_parser="qwen3_coder", reasoning_parser="qwen3")

    def seconds(count):
        text = "<think>" + "<tool_call><function=get_weather><parameter=city>x" * count + "</think>c"
        start = time.process_time()
        parse_once = form.parser(TOOLS)
        message = fold_events([*parse_once.feed(text), *parse_once.finish()])
        assert message.text.endswith("c")
        return time.process_time() - start

    seconds(10)
    assert seconds(1600) < 30 * max(seconds(200), 0.01)


def test_arguments_given_twice_are_those_given_first():
    form = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3")
    text = '<tool_call>{"name": "now", "arguments": {}, "parameters": {"a": 1}}</tool_call>'
    assert parse(form, text)[0] == [("now", {}, True)]
    assert parse(form, "<think>" + text)[0] == []
