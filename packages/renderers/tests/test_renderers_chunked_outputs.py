"""However an output is cut, truncated or spoilt: the parser always says the same, raises nothing, loses nothing.

`python packages/renderers/tests/test_renderers_chunked_outputs.py --count 1000000` does it so many times.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_renderers import CallArguments, CallEnd, CallStart, ChatFormat, fold_events, merge_events
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_formats import TOOL_FORMATS

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())
OUTPUTS = {
    name: [case["output"] for case in json.loads((GOLDEN / f"{name}.json").read_text())] for name in TOOL_FORMATS
}
THOUGHTS = {
    name: [case["output"] for case in json.loads((GOLDEN / "reasoning" / f"{name}.json").read_text())]
    for name in REASONING_FORMATS
}
FORMATS = {
    (tool, reasoning): ChatFormat(tool_parser=tool, reasoning_parser=reasoning)
    for tool in TOOL_FORMATS
    for reasoning in ((tool,) if TOOL_FORMATS[tool].thinks else ("none", "qwen3", "kimi_k2"))
}
MARKERS = {
    names: sorted({marker for table in form._tables.values() for each in table.exits.values() for marker in each.go})
    for names, form in FORMATS.items()
}
DIRT = (
    *(
        r"\ud83d",
        r"\ude00",
        r"\ud83d\ude00",
        "1e999",
        "-" + "9" * 40,
        "0.1000000000000000055511",
        "NaN",
        "none",
        '"none"',
    ),
    *(
        "None",
        '""',
        "``",
        "'\\ud83d'",
        "<think>",
        "</think>",
        "`</think>`",
        "\n",
        "  \n ",
        '"x", ',
        "]]>",
        "</",
        "<a b='c'>",
    ),
)
SENTINEL = re.compile(r"w\d{4}w")


def parse(form, pieces):
    parser = form.parser(TOOLS)
    events = []
    for piece in pieces:
        new = parser.feed(piece)
        events += new
    return merge_events([*events, *parser.finish()])


def cut(text, rng):
    pieces = []
    while text:
        size = rng.choice((1, 1, 2, 3, 5, 8, 20, 100))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def spoil(text, rng, markers):
    """Random damage: cut short, characters and markers lost, doubled, exchanged, nested, put where they do not belong;
    numbers and escapes that few readers take; thinking around it, which may not end or end in the middle."""
    for _ in range(rng.randrange(5)):
        if not text:
            break
        place = rng.randrange(len(text))
        kind = rng.randrange(11)
        if kind == 0:
            text = text[:place]
        elif kind == 1:
            text = text[:place] + text[place + rng.randrange(1, 4) :]
        elif kind == 2:
            text = text[:place] + text[place : place + 5] + text[place:]
        elif kind == 3:
            text = text[:place] + rng.choice("{}[]()<>\"'\\,:=\n \x00é😀0`") + text[place:]
        elif kind == 4:
            other = rng.choice(OUTPUTS[rng.choice(list(OUTPUTS))])
            text = text[:place] + other[rng.randrange(len(other)) :][:20] + text[place:]
        elif kind == 5:
            text += rng.choice(OUTPUTS[rng.choice(list(OUTPUTS))])
        elif kind == 6:
            text = (
                text[:place] + rng.choice(("", "\n", " ")) + rng.choice(markers) + rng.choice(("", "\n")) + text[place:]
            )
        elif kind == 7:
            text = text.replace(rng.choice(markers), "", rng.randrange(1, 3))
        elif kind == 8:
            text = text[:place] + rng.choice(DIRT) + text[place:]
        elif kind == 9:
            text = text[:place] + text + text[place:]
        else:
            end = rng.choice((place, len(text)))
            text = "<think>" + text[:end] + rng.choice(("", "</think>", "`</think>`", "\n</think>\n\n")) + text[end:]
    return text


def check_well_formed(events):
    """Every call begins, gives pieces that can always be closed, and ends, in order; its arguments are an object."""
    at, open_call = -1, False
    for event in events:
        match event:
            case CallStart(index, name):
                assert (index, open_call) == (at + 1, False)
                assert name
                at, open_call = index, True
            case CallArguments(index):
                assert (index, open_call) == (at, True)
            case CallEnd(index):
                assert (index, open_call) == (at, True)
                open_call = False
            case _:
                assert event.text
    assert not open_call
    for call in fold_events(events).calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("names", FORMATS, ids=str)
def test_any_chunking_gives_the_same_events(names):
    rng = random.Random(repr(names))
    for output in (*OUTPUTS[names[0]], *THOUGHTS[names[0] if TOOL_FORMATS[names[0]].thinks else "qwen3"]):
        for _ in range(3):
            text = spoil(output, rng, MARKERS[names])
            whole = parse(FORMATS[names], [text])
            check_well_formed(whole)
            assert parse(FORMATS[names], list(text)) == whole, text
            for _ in range(3):
                pieces = cut(text, rng)
                assert parse(FORMATS[names], pieces) == whole, pieces


@pytest.mark.parametrize("tool", OUTPUTS)
def test_every_truncation_is_closed(tool):
    form = FORMATS[tool, tool if TOOL_FORMATS[tool].thinks else "none"]
    for output in OUTPUTS[tool]:
        whole = fold_events(parse(form, [output]))
        for end in range(len(output)):
            events = parse(form, [output[:end]])
            check_well_formed(events)
            cut_short = fold_events(events)
            # What was already given out as a call stays one, and only the last may be incomplete.
            assert len(cut_short.calls) <= len(whole.calls)
            assert all(call.complete for call in cut_short.calls[:-1])
            for call, full in zip(cut_short.calls, whole.calls, strict=False):
                assert call.name == full.name
                if call.complete:
                    assert json.loads(call.arguments) == json.loads(full.arguments)


def with_sentinels(text, rng):
    """Replace the words of an output, but for the format's own, by words that occur nowhere else."""
    own = set(re.findall(r"\w+", " ".join((*(each.prefix for each in TOOL_FORMATS.values()), "to functions"))))
    own |= {"name", "arguments", "parameters", "type", "function", "id", "true", "false", "null", "True", "False"}
    own |= {
        "None",
        "string",
        "commentary",
        "analysis",
        "final",
        "message",
        "json",
        "call",
        "now",
        "get_weather",
        "assistant",
    }
    return re.sub(
        r'(?<=[ ">])(?!w\d)[A-Za-z]{4,}(?=[ "<,.])',
        lambda m: m[0] if m[0] in own else f"w{rng.randrange(10**4):04}w",
        text,
    )


@pytest.mark.parametrize("names", FORMATS, ids=str)
def test_no_text_is_lost(names):
    """Words put into an output, which is then spoilt, are all found again: in text, reasoning, names or arguments."""
    rng = random.Random(repr(names))
    for output in OUTPUTS[names[0]]:
        for _ in range(6):
            text = spoil(with_sentinels(output, rng), rng, MARKERS[names])
            message = fold_events(parse(FORMATS[names], [text]))
            found = " ".join(
                (
                    message.text,
                    message.reasoning,
                    *(f"{call.name} {call.arguments} {call.id}" for call in message.calls),
                )
            )
            missing = set(SENTINEL.findall(text)) - set(SENTINEL.findall(found))
            assert not missing, (missing, text, message)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_arbitrary_text_between_markers(data):
    tool = data.draw(st.sampled_from(sorted(OUTPUTS)))
    names = (tool, tool) if TOOL_FORMATS[tool].thinks else (tool, data.draw(st.sampled_from(("none", "qwen3"))))
    piece = st.one_of(
        st.sampled_from(MARKERS[names]), st.text(max_size=6), st.sampled_from(("now", "city", '{"a": ', " ", "\n"))
    )
    pieces = data.draw(st.lists(piece, max_size=20))
    whole = parse(FORMATS[names], ["".join(pieces)])
    check_well_formed(whole)
    assert parse(FORMATS[names], pieces) == whole
    assert parse(FORMATS[names], list("".join(pieces))) == whole


def test_plain_formats_pass_text_through():
    form = ChatFormat(tool_parser="none", reasoning_parser="none")
    assert form.is_plain(tools=True)
    text = " \n <tool_call>{}</think> \n"
    assert fold_events(parse(form, list(text))).text == text


def main() -> None:
    options = argparse.ArgumentParser(
        description="Random chunkings of whole, spoilt and truncated outputs of all formats"
    )
    options.add_argument("--count", type=int, default=20_000, help="chunkings")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    rng, names = random.Random(args.seed), list(FORMATS)
    num_done = num_different = num_lost = 0
    start = time.process_time()
    while num_done < args.count:
        pair = rng.choice(names)
        corpus = [*OUTPUTS[pair[0]], *THOUGHTS[pair[0] if TOOL_FORMATS[pair[0]].thinks else "qwen3"]]
        text = spoil(with_sentinels(rng.choice(corpus), rng), rng, MARKERS[pair])
        whole = parse(FORMATS[pair], [text])
        check_well_formed(whole)
        message = fold_events(whole)
        calls = (f"{call.name} {call.arguments} {call.id}" for call in message.calls)
        missing = set(SENTINEL.findall(text)) - set(
            SENTINEL.findall(" ".join((message.text, message.reasoning, *calls)))
        )
        if missing:
            num_lost += 1
            print("lost", pair, missing, repr(text), flush=True)
        for _ in range(10):
            pieces = cut(text, rng)
            num_done += 1
            if parse(FORMATS[pair], pieces) != whole:
                num_different += 1
                print("differs", pair, pieces, flush=True)
    seconds = time.process_time() - start
    print(
        f"{num_done} chunkings, {num_different} differ, {num_lost} outputs lost text; {seconds:.0f} s of processor time"
    )


if __name__ == "__main__":
    main()
