"""Harmony as OpenAI's own library writes and reads it: random conversations, golden outputs, and outputs cut short.

That library wants the vocabulary of its models, and checks that it is the right one: whoever has the file names its
folder in TIKTOKEN_ENCODINGS_BASE.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import openai_harmony
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Author, HarmonyEncodingName, Message, Role, StreamableParser, TextContent

from quire_renderers import ChatFormat, fold_events

GOLDEN = Path(__file__).parent / "golden"
TOOLS = json.loads((GOLDEN / "tools" / "tools.json").read_text())
FORM = ChatFormat(tool_parser="gpt_oss", reasoning_parser="auto")
START = "<|start|>assistant"


@pytest.fixture(scope="module")
def harmony():
    """The library's encoding of gpt-oss."""
    folder = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if folder is None or not (Path(folder) / "o200k_base.tiktoken").is_file():
        pytest.skip("needs OpenAI's vocabulary: o200k_base.tiktoken in a folder that TIKTOKEN_ENCODINGS_BASE names")
    return openai_harmony.load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def ours(text, tools=TOOLS):
    parser = FORM.parser(tools)
    return fold_events([*parser.feed(text), *parser.finish()])


def test_code_whose_end_is_no_part_of_the_text():
    """<|call|> ends the output, and stop tokens are left out of it; a limit that comes before leaves the call open."""
    for stopped in (True, False):
        for pieces in (
            ["<|channel|>analysis to=python code<|message|>print(1)"],
            ["<|channel|>analysis to=py", "thon code<|message|>prin", "t(1)"],
        ):
            parser = FORM.parser(None)
            message = fold_events(
                [event for piece in pieces for event in parser.feed(piece)] + parser.finish(stopped=stopped)
            )
            [call] = message.calls
            assert (call.name, json.loads(call.arguments), call.complete) == ("python", {"code": "print(1)"}, stopped)


def parts_of(harmony, text):
    """(channel, recipient, text) of each message, the last of which may be unfinished."""
    parser = StreamableParser(harmony, Role.ASSISTANT)
    for token_id in harmony.encode(text, allowed_special="all"):
        parser.process(token_id)
    parts = [(each.channel, each.recipient, each.content[0].text) for each in parser.messages]
    if parser.current_content:
        parts.append((parser.current_channel, parser.current_recipient, parser.current_content))
    # Of a header without recipient the library (0.0.8) takes the content type for one.
    return [(channel, None if (to or "").startswith("<|constrain|>") else to, body) for channel, to, body in parts]


def same(message, parts):
    """Whether our message has the parts."""
    calls = [(recipient.removeprefix("functions."), text) for _, recipient, text in parts if recipient]
    thoughts = [text for channel, recipient, text in parts if channel == "analysis" and not recipient]
    texts = [text for channel, recipient, text in parts if channel in ("commentary", "final") and not recipient]
    assert message.reasoning == "".join(thoughts)
    assert message.text == "".join(texts)
    assert [call.name for call in message.calls] == [name for name, _ in calls]
    assert all(call.complete for call in message.calls)
    arguments = [{"code": text} if name == "python" and text[:1] != "{" else json.loads(text) for name, text in calls]
    assert [json.loads(call.arguments) for call in message.calls] == arguments


TEXT = st.text(st.sampled_from('ab <>|{}"\\\n:=é日to=functions'), min_size=1, max_size=30).filter(
    lambda text: text == text.strip() and "<|" not in text
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "größe"]), st.one_of(TEXT, st.integers(), st.none()))
MESSAGES = st.one_of(
    st.tuples(st.just("analysis"), st.none(), TEXT),
    st.tuples(st.just("commentary"), st.none(), TEXT),
    st.tuples(
        st.sampled_from(["commentary", "analysis"]),
        st.sampled_from(["functions.get_weather", "functions.now", "browser.search", "browser.open"]),
        ARGUMENTS.map(lambda values: json.dumps(values, ensure_ascii=False)),
    ),
)


@settings(deadline=None, max_examples=60)
@given(
    messages=st.lists(MESSAGES, max_size=5),
    final=TEXT,
    content_type=st.sampled_from([None, "json", "code", "<|constrain|>json"]),
)
def test_conversations_that_the_library_writes_are_read_the_same(harmony, messages, final, content_type):
    written = []
    for channel, recipient, text in [*messages, ("final", None, final)]:
        message = Message(
            author=Author(role=Role.ASSISTANT), content=[TextContent(text=text)], channel=channel, recipient=recipient
        )
        written += harmony.render(message.with_content_type(content_type) if recipient and content_type else message)
    output = harmony.decode(written).removeprefix(START)
    parts = parts_of(harmony, output)
    assert parts == [*messages, ("final", None, final)]
    same(ours(output), parts)


def test_the_library_reads_the_golden_outputs_as_we_do(harmony):
    num_compared = 0
    for case in json.loads((GOLDEN / "gpt_oss.json").read_text()):
        if "<|message|>" in case["output"]:
            same(ours(case["output"]), parts_of(harmony, case["output"]))
            num_compared += 1
    assert num_compared >= 12


def test_thoughts_and_answers_cut_short_are_all_there(harmony):
    num_compared = 0
    for case in json.loads((GOLDEN / "gpt_oss.json").read_text()):
        tokens = harmony.encode(case["output"], allowed_special="all")
        for size in range(1, len(tokens)):
            parser = StreamableParser(harmony, Role.ASSISTANT)
            for token_id in tokens[:size]:
                parser.process(token_id)
            if parser.current_content and not parser.current_recipient:
                text = harmony.decode(tokens[:size])
                same(ours(text), parts_of(harmony, text))
                num_compared += 1
    assert num_compared > 50
