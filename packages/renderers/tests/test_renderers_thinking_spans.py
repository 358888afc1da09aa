"""Where the model thinks, in characters of the fed text: the same for every cutting, never before it is settled."""

from __future__ import annotations

import pytest

from quire_renderers import ChatFormat, OutputParser

NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HARMONY = "<|channel|>analysis<|message|>One two.<|end|><|start|>assistant<|channel|>final<|message|>Three."


def thoughts(parser: OutputParser, text: str) -> list[str]:
    return [text[span.begin : span.end] for span in parser.thinking_spans]


CASES = [
    ("qwen3", "", "<think>\none\n</think>\n\ntwo", ["\none\n"]),
    ("qwen3", "", "no thinking", []),
    ("qwen3", "", "<think>one", ["one"]),
    ("qwen3", "", f"<think>one{CALL}</think>two", ["one", ""]),
    ("qwen3", "", f"<think>one{CALL} two </think>three", ["one", " two "]),
    ("qwen3", "", f"<think>one{CALL} two", ["one"]),
    ("qwen3", "", '<think>a `<tool_call>` is {"name": 1}</think>b', ['a `<tool_call>` is {"name": 1}']),
    ("qwen3", "", '<think>one<tool_call>{"name": 1</think>b', ['one<tool_call>{"name": 1']),
    ("deepseek_r1", "", "one</think>two", ["one"]),
    ("deepseek_r1", "", "<think>one</think>two", ["one"]),
    ("deepseek_r1", "</think>", "one</think>two", []),
    ("gpt_oss", "", HARMONY, ["One two."]),
]


@pytest.mark.parametrize(("reasoning", "prompt", "text", "expected"), CASES)
def test_spans_of_every_cutting(reasoning: str, prompt: str, text: str, expected: list[str]) -> None:
    form = ChatFormat(tool_parser="gpt_oss" if reasoning == "gpt_oss" else "hermes", reasoning_parser=reasoning)
    for size in (1, 2, 3, 7, len(text)):
        parser = form.parser([NOW], prompt=prompt)
        read = 0
        for begin in range(0, len(text), size):
            parser.feed(text[begin : begin + size])
            assert read <= parser.num_read <= min(len(text), begin + size)
            read = parser.num_read
        parser.finish()
        assert parser.num_read == len(text)
        assert thoughts(parser, text) == expected
        for span in parser.thinking_spans[:-1]:
            assert span.after is not None


def test_dropped_special_tokens_keep_their_place() -> None:
    form = ChatFormat(tool_parser="hermes", reasoning_parser="qwen3", special_tokens=["<think>", "<pad>"])
    text = "<pad><think>one<pad>two</think>three<pad>"
    for size in (1, 4, len(text)):
        parser = form.parser([NOW], skip_special_tokens=True)
        for begin in range(0, len(text), size):
            parser.feed(text[begin : begin + size])
        parser.finish()
        assert thoughts(parser, text) == ["one<pad>two"]


@pytest.mark.parametrize(
    ("reasoning", "kwargs", "prompt", "expected"),
    [
        ("qwen3", None, "", False),
        ("qwen3", {"enable_thinking": True}, "", True),
        ("qwen3", {"enable_thinking": True}, "<think>\n\n</think>\n\n", False),
        ("deepseek_r1", None, "", True),
        ("deepseek_v3", {"thinking": False}, "", False),
        ("gpt_oss", None, "", True),
        ("granite", {"thinking": True}, "", True),
        ("granite", None, "", False),
    ],
)
def test_when_an_output_may_think(reasoning: str, kwargs: dict[str, bool] | None, prompt: str, expected: bool) -> None:
    form = ChatFormat(tool_parser="hermes", reasoning_parser=reasoning)
    assert form.may_think(prompt, None, kwargs) is expected


def test_a_call_that_is_certain_needs_no_more_than_its_name() -> None:
    form = ChatFormat(tool_parser="hermes", reasoning_parser="none")
    for must_call in (False, True):
        parser = form.parser([NOW], must_call=must_call)
        parser.feed('<tool_call>\n{"name": "now", "argum')
        parser.finish()
        assert parser.num_calls == int(must_call)


def test_a_certain_call_that_ends_with_its_name_is_one() -> None:
    form = ChatFormat(tool_parser="glm45", reasoning_parser="none")
    for name, num_calls in (("now", 1), ("no", 0)):
        parser = form.parser([NOW], must_call=True)
        parser.feed(f"<tool_call>{name}")
        parser.finish()
        assert parser.num_calls == num_calls
