"""The chat template renders every kind of conversation in a sandbox, and refuses what it cannot read."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from chat import load_template

TEMPLATE = load_template()
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
HELLO = [{"role": "user", "content": "Hello"}]


def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return TEMPLATE.render(messages=messages, **kwargs)


def test_plain_turns() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_is_asked_for_in_the_system_part() -> None:
    assert render(HELLO, enable_thinking=True).startswith("<|im_start|>system\nThink before you answer.<|im_end|>\n")
    assert render(HELLO, enable_thinking=False) == render(HELLO)
    with_system = render([{"role": "system", "content": "Be brief."}, *HELLO], enable_thinking=True)
    assert with_system.startswith("<|im_start|>system\nBe brief.\nThink before you answer.<|im_end|>\n")


def test_tools_are_offered_as_json_lines() -> None:
    text = render(HELLO, tools=[TOOL, TOOL])
    offered = text.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    assert [json.loads(line) for line in offered] == [TOOL, TOOL]


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
def test_calls_and_their_responses(arguments: object) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "rainy", "tool_call_id": "c2"},
    ]
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert render(messages).endswith(
        f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nrainy\n</tool_response><|im_end|>\n"
    )


def test_only_thoughts_after_the_last_question_are_shown() -> None:
    answer = {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."}
    shown = "<think>\nA greeting.\n</think>\n\nHi."
    assert render([*HELLO, answer, *HELLO, answer]).count(shown) == 1
    assert shown not in render([*HELLO, answer, *HELLO])


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render([{"role": "user", "content": parts}]) == render(HELLO)
    with pytest.raises(jinja2.TemplateError, match="part of type image_url"):
        render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(jinja2.TemplateError, match="Unknown role wizard"):
        render([{"role": "wizard", "content": "Hello"}])
