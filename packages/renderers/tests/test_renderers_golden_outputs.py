"""The golden outputs of every format: written after the models' cards, with the message that each one means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_renderers import ChatFormat, fold_events
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_formats import TOOL_FORMATS

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())


def cases(folder, names):
    return [
        pytest.param(name, case, id=f"{name}-{index}")
        for name in names
        for index, case in enumerate(json.loads((folder / f"{name}.json").read_text()))
    ]


def check(parser, case):
    message = fold_events([*parser.feed(case["output"]), *parser.finish()])
    calls = []
    for call, wanted in zip(message.calls, case["calls"], strict=True):
        assert call.complete
        calls.append({"name": call.name, "arguments": json.loads(call.arguments)})
        if "id" in wanted:
            calls[-1]["id"] = call.id
    assert calls == case["calls"]
    assert (message.text, message.reasoning) == (case["text"], case["reasoning"])


@pytest.mark.parametrize(("name", "case"), cases(GOLDEN, TOOL_FORMATS))
def test_tool_format(name, case):
    check(ChatFormat(tool_parser=name, reasoning_parser="auto").parser(TOOLS), case)


@pytest.mark.parametrize(("name", "case"), cases(GOLDEN / "reasoning", REASONING_FORMATS))
def test_reasoning_format(name, case):
    parser = ChatFormat(tool_parser="none", reasoning_parser=name).parser(
        prompt=case.get("prompt"), chat_template_kwargs=case.get("kwargs")
    )
    check(parser, case)


@pytest.mark.parametrize("tool_parser", [name for name, form in TOOL_FORMATS.items() if not form.thinks])
def test_thinking_before_every_kind_of_call(tool_parser):
    form = ChatFormat(tool_parser=tool_parser, reasoning_parser="qwen3")
    for case in json.loads((GOLDEN / f"{tool_parser}.json").read_text()):
        thinking = {**case, "output": "<think>\nhm\n</think>\n\n" + case["output"], "reasoning": "hm"}
        thinking["text"] = case["text"].lstrip()
        check(form.parser(TOOLS), thinking)
