"""Prompts of models that come with an encoder instead of a chat template, as that encoder writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_renderers import ChatFormat
from quire_renderers.chat_template import ChatTemplates, Conversation
from quire_renderers.prompt_encodings import PROMPT_ENCODINGS, read_prompt_encoding
from quire_renderers.template_sandbox import TemplateSandbox
from quire_renderers.tokenizer_files import read_tokenizer_files

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())
SANDBOX = TemplateSandbox(max_chars=1_000_000, timeout_s=30)
CASES = [
    pytest.param(kind, case, id=f"{kind}-{index}")
    for kind in PROMPT_ENCODINGS
    for index, case in enumerate(json.loads((GOLDEN / "prompts" / f"{kind}.json").read_text()))
]


def prompt(kind, messages, tools, extra):
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    templates = ChatTemplates(
        {"default": read_prompt_encoding(kind)}, {"bos_token": "<｜begin▁of▁sentence｜>"}, SANDBOX
    )
    conversation = Conversation(messages, tools, add_generation_prompt=True, continue_final_message=False, extra=extra)
    return templates.render(conversation)


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_prompts_are_those_of_the_published_encoder(kind, case):
    extra = {"thinking": case["thinking"]}
    if case.get("reasoning_effort"):
        extra["reasoning_effort"] = case["reasoning_effort"]
    messages = json.loads(json.dumps(case["messages"]))
    assert prompt(kind, messages, TOOLS if case["tools"] else None, extra) == case["prompt"]


@pytest.mark.parametrize("kind", PROMPT_ENCODINGS)
def test_a_folder_without_a_template_gets_the_one_of_its_model_type(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    template = read_tokenizer_files(tmp_path).chat_templates["default"]
    form = ChatFormat(chat_template=template)
    assert (form.tool_parser, form.reasoning_parser) == (kind, "deepseek_v3")
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert read_tokenizer_files(tmp_path).chat_templates == {"default": "its own"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_tokenizer_files(tmp_path).chat_templates == {}


class CountingSandbox(TemplateSandbox):
    """Counts the rounds of loops."""

    num_ticks = 0

    def tick(self):
        self.num_ticks += 1
        return super().tick()


@pytest.mark.parametrize("kind", PROMPT_ENCODINGS)
def test_rounds_of_loops_grow_with_the_number_of_messages(kind):
    def num_rounds(num_turns):
        sandbox = CountingSandbox(max_chars=1_000_000, timeout_s=30)
        templates = ChatTemplates({"default": read_prompt_encoding(kind)}, {"bos_token": ""}, sandbox)
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * num_turns
        templates.render(
            Conversation(
                [*messages, messages[0]], None, add_generation_prompt=True, continue_final_message=False, extra={}
            )
        )
        return sandbox.num_ticks

    one, two, three = (num_rounds(num_turns) for num_turns in (20, 40, 60))
    assert three - two == two - one > 0
