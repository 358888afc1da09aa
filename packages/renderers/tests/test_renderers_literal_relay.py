"""The relay of values, against the json and ast modules: same values, closable at every moment, cut anyhow."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_renderers.literal_relay import GEMMA, JSON, PYTHON, LiteralRelay, replace_lone_surrogates

TEXT = st.text(max_size=8)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)


def relay_all(pieces, dialect=JSON, **options):
    """What is given out, checking at each moment that it can be closed; (text, relay)."""
    relay, given = LiteralRelay(dialect, **options), ""
    for piece in pieces:
        position = 0
        while position < len(piece) and not relay.failed and not relay.done:
            more, position, _ = relay.feed(piece, position)
            given += more
        if given:
            json.loads(given + relay.closers)
        else:
            assert relay.closers == ""
    given += relay.finish()
    return given, relay


@settings(max_examples=150, deadline=None)
@given(OBJECTS, st.sampled_from((None, 1)), st.booleans())
def test_json_objects_pass_as_they_are(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for pieces in ([text], list(text)):
        given, relay = relay_all(pieces, needs_object=True)
        assert relay.done
        assert json.loads(given) == value


@settings(max_examples=100, deadline=None)
@given(OBJECTS)
def test_objects_as_json_text_in_a_string(value):
    text = json.dumps(json.dumps(value))
    for pieces in ([text], list(text)):
        given, relay = relay_all(pieces, needs_object=True)
        assert relay.done
        assert json.loads(given) == value


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_python_literals(value):
    for pieces in ([repr(value)], list(repr(value))):
        given, _ = relay_all(pieces, PYTHON)
        assert json.loads(given) == value


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_taken_or_refused_the_same_however_it_is_cut(text):
    for dialect in (JSON, PYTHON, GEMMA):
        for begin in ("{", '{"a": [', "{a:<escape>", "[", ""):
            whole, one = relay_all([begin + text], dialect)
            cut, other = relay_all(list(begin + text), dialect)
            assert (whole, one.failed, one.done) == (cut, other.failed, other.done)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"a": "two\nlines\tand \x01"}', {"a": "two\nlines\tand \x01"}),
        (r'{"a": "\d+ \' \q"}', {"a": r"\d+ \' \q"}),
        ('{"a": 1, "b": [1, 2, ], }', {"a": 1, "b": [1, 2]}),
        ('{"a": True, "b": None, "c": False}', {"a": True, "b": None, "c": False}),
        ('{"a": NaN, "b": [Infinity, -Infinity]}', {"a": "NaN", "b": ["Infinity", "-Infinity"]}),
        (r'{"a": "\u12"}', {"a": r"\u12"}),
        (' \n{ "a" : -1.5e3 } ', {"a": -1500.0}),
        ('""', {}),
        ("null", {}),
    ],
)
def test_common_slips_are_repaired(text, meant):
    for pieces in ([text], list(text)):
        given, relay = relay_all(pieces, needs_object=True)
        assert relay.done
        assert json.loads(given) == meant


@pytest.mark.parametrize(
    "text",
    [
        r'{"a": "\ud83d\ude00 \ud83d x \ude00"}',
        r'{"\ud83d": "\ud83d\u0041\uDC00\uD800"}',
        '{"a": 1e999, "b": -1e-999, "c": 123456789012345678901234567890, "d": 0.1000000000000000055511151231257827}',
        '{"a": ' + "9" * 4300 + "}",
        '{"a": 1, "a": 2, "a": 1.0}',
        '{ "a" :[ 1 ,2.50 ] }',
    ],
)
@pytest.mark.parametrize("in_text", [False, True])
def test_what_the_model_wrote_is_passed_on_letter_by_letter(text, in_text):
    """Numbers that no double holds, halves of surrogate pairs, keys given twice: valid JSON in valid UTF-8."""
    written = json.dumps(text) if in_text else text
    for pieces in ([written], list(written)):
        given, relay = relay_all(pieces, needs_object=True)
        assert relay.done
        assert given == text
        assert json.loads(given.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "dialect", "given"),
    [
        ('"\ud83d and \ud83d\ude00"', JSON, r'"\ud83d and \ud83d\ude00"'),
        ("'\ud83d'", PYTHON, r'"\ud83d"'),
        (r"'\ud83d \U0000dc00 \x41'", PYTHON, r'"\ud83d \udc00 A"'),
        ("{a:<escape>\ud83d<escape>}", GEMMA, r'{"a":"\ud83d"}'),
        (r'"{\"a\": \"\ud83d\"}"', JSON, r'{"a": "\ud83d"}'),
    ],
)
def test_halves_of_surrogate_pairs_leave_as_escapes(text, dialect, given):
    for pieces in ([text], list(text)):
        assert relay_all(pieces, dialect, needs_object=given[0] == "{")[0] == given


@pytest.mark.parametrize(
    "text",
    ['{"a": oops}', "{'a': 1}", '{"a" 1}', '{"a": 01}', "[1]", "5", '"text"', '{"a": 1]', '{,}', "{" * 5,
     '{"a":' + "[" * 100 + "]" * 100 + "}", '{"a": ' + "1" * 5000 + "}", '"{\\"a\\": 1} and more"'],
)  # fmt: skip
def test_what_is_no_object_fails_where_it_goes_wrong(text):
    (whole, one), (cut, other) = relay_all([text], needs_object=True), relay_all(list(text), needs_object=True)
    assert whole == cut
    assert one.failed
    assert other.failed


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("'it\\'s \\x41 \\u00e9 \\n'", "it's A é \n"),
        ('"""a "quoted" word\nand a line"""', 'a "quoted" word\nand a line'),
        ("''", ""),
        ("(1, (2,), [])", [1, [2], []]),
        ("{'a': {1: 'x'}}", {"a": {"1": "x"}}),
        ("1_000", 1000),
        ("+5", 5),
    ],
)
def test_what_python_writes_in_its_own_way(text, meant):
    for pieces in ([text + ")"], [*text, ")"]):
        assert json.loads(relay_all(pieces, PYTHON)[0]) == meant


def test_long_strings_take_time_in_proportion():
    relay = LiteralRelay(needs_object=True)
    given = [relay.feed(piece)[0] for piece in ('{"a": "', *["some text, "] * 20_000, '"}')]
    assert len(json.loads("".join(given))["a"]) == 220_000


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (r'"\ud83d"', "\ufffd"),
        (r'"\ud83d\ude00 \uD83Dx\uDC00"', "😀 \ufffdx\ufffd"),
        (r'"\\ud83d \\\ud83d \n\u0041"', "\\ud83d \\\ufffd \nA"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd😀"),
    ],
)
def test_lone_surrogates_can_be_replaced_in_json(text, meant):
    assert json.loads(replace_lone_surrogates(text)) == meant
