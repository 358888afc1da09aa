"""Every published output means the same when it comes in two pieces, wherever it is cut, and never loses an event."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_renderers import ChatFormat, fold_events, merge_events
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_formats import TOOL_FORMATS

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())


def events_of(form, *pieces):
    parser = form.parser(TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def outputs(path):
    return [case["output"] for case in json.loads(path.read_text())]


def check_all_cuts(form, output):
    whole = events_of(form, output)
    merged, message = merge_events(whole), fold_events(whole)
    for place in range(len(output) + 1):
        events = events_of(form, output[:place], output[place:])
        assert merge_events(events) == merged, output[:place]
        assert fold_events(events) == message, output[:place]


@pytest.mark.parametrize("tool", TOOL_FORMATS)
def test_calls_may_be_cut_anywhere(tool):
    reasoning = tool if TOOL_FORMATS[tool].thinks else "none"
    form = ChatFormat(tool_parser=tool, reasoning_parser=reasoning)
    for output in outputs(GOLDEN / f"{tool}.json"):
        check_all_cuts(form, output)


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_thinking_may_be_cut_anywhere(reasoning):
    form = ChatFormat(tool_parser="none", reasoning_parser=reasoning)
    for output in outputs(GOLDEN / "reasoning" / f"{reasoning}.json"):
        check_all_cuts(form, output)


@pytest.mark.parametrize("tool", TOOL_FORMATS)
def test_what_was_fed_is_read_in_order_and_to_the_end(tool):
    form = ChatFormat(tool_parser=tool, reasoning_parser=tool if TOOL_FORMATS[tool].thinks else "qwen3")
    for output in outputs(GOLDEN / f"{tool}.json"):
        parser, num_read = form.parser(TOOLS), 0
        for place, char in enumerate(output, 1):
            parser.feed(char)
            assert num_read <= parser.num_read <= place
            num_read = parser.num_read
        parser.finish()
        for span in parser.thinking_spans:
            assert 0 <= span.begin <= (span.end if span.end is not None else len(output)) <= len(output)
