"""Structural tags: free text around parts that follow a grammar of their own."""

from __future__ import annotations

import json
import re

import pytest

from quire_interfaces import RequestError, StructuredOutputsParams
from quire_testkit.conformance.grammar_backend import TOKENS, allowed_tokens

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FIRST = {"triggers": ["<f="], "structures": [{"begin": "<f=ab>", "schema": SCHEMA, "end": "</f>"}]}
CALL = {"type": "tag", "begin": "<f=ab>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}


def accepts(backend, tag, text, encode) -> bool:
    """Whether the whole text is an output."""
    matcher = backend.compile(StructuredOutputsParams(structural_tag=tag).spec()).new_matcher()
    token_ids = encode(text) if isinstance(text, str) else text
    return all(matcher.accept(token_id) for token_id in token_ids) and matcher.accept(0)


@pytest.mark.parametrize("tag", [FIRST, {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]}}])
def test_calls_within_free_text(backend, encode, tag):
    for text in ("", "free text", 'a <f=ab>{"x": 12}</f> b', '<f=ab>{"x":1}</f><f=ab>{"x":2}</f>', "a < b"):
        assert accepts(backend, tag, text, encode), text
    for text in ('<f=ab>{"y": 12}</f>', "<f=ba>", '<f=ab>{"x": 12}', "so <f="):
        assert not accepts(backend, tag, text, encode), text


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"at_least_one": True}, ['<f=ab>{"x":1}</f>', 'a <f=ab>{"x":1}</f> b'], ["", "text"]),
        ({"stop_after_first": True}, ["text", '<f=ab>{"x":1}</f>'], ['<f=ab>{"x":1}</f> b']),
        ({"at_least_one": True, "stop_after_first": True}, ['a <f=ab>{"x":1}</f>'], ["", '<f=ab>{"x":1}</f> b']),
    ],
)
def test_how_many_calls(backend, encode, options, good, bad):
    tag = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], **options}}
    assert [accepts(backend, tag, text, encode) for text in good] == [True] * len(good)
    assert [accepts(backend, tag, text, encode) for text in bad] == [False] * len(bad)


def test_the_nested_notation(backend, encode):
    tag = {
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "A: "},
                {"type": "or", "elements": [{"type": "regex", "pattern": "a/[bc]"}, CALL]},
                {"type": "grammar", "grammar": 'start: "!" x\nx: "?"*'},
            ],
        }
    }
    for text in ("A: a/b!", "A: a/c!??", 'A: <f=ab>{"x":-1}</f>!?'):
        assert accepts(backend, tag, text, encode), text
    for text in ("A: a/d!", "A: a/b", "a/b!"):
        assert not accepts(backend, tag, text, encode), text


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, r"(<c>(, <c>)*)?"),
        ({"at_least_one": True}, r"<c>(, <c>)*"),
        ({"stop_after_first": True}, r"(<c>)?"),
        ({"at_least_one": True, "stop_after_first": True}, "<c>"),
        ({"separator": ""}, "(<c>)*"),
    ],
)
def test_tags_with_a_separator(backend, encode, options, pattern):
    one = {"type": "tag", "begin": "<", "content": {"type": "const_string", "value": "c"}, "end": ">"}
    tag = {"format": {"type": "tags_with_separator", "tags": [one], "separator": ", ", **options}}
    for text in ("", "<c>", "<c>, <c>", "<c>, <c>, <c>", "<c><c>", "<c>, ", "c"):
        assert accepts(backend, tag, text, encode) == bool(re.fullmatch(pattern, text)), text


def test_control_tokens_in_markers_stand_for_themselves(backend, encode):
    marker = TOKENS[1].decode()
    tags = [{"type": "tag", "begin": f"{marker}ab ", "content": {"type": "regex", "pattern": "[0-9]"}, "end": marker}]
    tag = {"format": {"type": "triggered_tags", "triggers": [marker], "tags": tags}}
    assert accepts(backend, tag, [*encode("text"), 1, *encode("ab 1"), 1, *encode("more")], encode)
    assert not accepts(backend, tag, [1, *encode("ab x"), 1], encode)
    spelled = encode(marker)
    assert spelled != [1]
    assert accepts(backend, tag, spelled, encode), "the same letters are text"


def test_white_space_in_a_schema_is_bounded(backend, encode):
    head = encode('<f=ab>{"x":')
    matcher = backend.compile(StructuredOutputsParams(structural_tag=FIRST).spec()).new_matcher()
    assert all(matcher.accept(token_id) for token_id in head)
    space = encode(" ")[0]
    num_spaces = 0
    while space in allowed_tokens(matcher, len(TOKENS)):
        assert matcher.accept(space)
        num_spaces += 1
        assert num_spaces < 100
    assert num_spaces > 3


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({}, "$ must have 'format'"),
        ({"format": 3}, "format must be an object"),
        ({"format": {"type": "poem"}}, "format.type must be one of"),
        ({"format": {"type": "__init__"}}, "format.type must be one of"),
        ({"format": {"type": "sequence", "elements": []}}, "format.elements must be a list"),
        ({"format": {"type": "or", "elements": [{"type": "regex"}]}}, "format.elements[0].pattern must be text"),
        ({"format": {"type": "tag", "begin": "a"}}, "format.end must be text"),
        ({"format": {**CALL, "content": {"type": "json_schema", "json_schema": 3}}}, "format.content.json_schema must"),
        ({"triggers": ["<g"], "structures": FIRST["structures"]}, "must start with one of the triggers"),
        ({"triggers": [""], "structures": FIRST["structures"]}, "triggers[0] must be text"),
        ({"triggers": ["<f"], "structures": [3]}, "structures[0] must be an object"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(backend, tag, place):
    with pytest.raises(RequestError) as error:
        backend.compile(StructuredOutputsParams(structural_tag=tag).spec())
    assert place in str(error.value)
    assert error.value.param == "structured_outputs.structural_tag"


def test_deep_nesting_is_refused(backend):
    value = {"type": "const_string", "value": "a"}
    for _ in range(200):
        value = {"type": "sequence", "elements": [value]}
    with pytest.raises(RequestError, match="nested at most"):
        backend.compile(StructuredOutputsParams(structural_tag=json.dumps({"format": value})).spec())
