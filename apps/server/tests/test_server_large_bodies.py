"""Too large constraints are found without parsing bodies, and named."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_interfaces import RequestError
from quire_server.large_bodies import BodyInspector, find_too_large, find_too_many
from quire_server.value_count import ValueBounds, count_values, may_exceed

SMALL = {"type": "object"}
BOUNDS = ValueBounds(20, 5)


@pytest.mark.parametrize(
    ("body", "field", "part"),
    [
        (
            {"structured_outputs": {"json": {"properties": {"a": {}, "b": {"enum": [1] * 900}}}}},
            "structured_outputs",
            "structured_outputs.json.properties.b.enum (",
        ),
        ({"structured_outputs": {"regex": "é" * 600}}, "structured_outputs", "structured_outputs.regex (36"),
        ({"guided_choice": ["a", "b" * 1200]}, "guided_choice", "guided_choice[1] (1202 bytes)"),
        ({"text": {"format": {"schema": {"const": "c" * 1200}}}}, "text", "text.format.schema.const (1202"),
        ({"tools": [{"function": {"parameters": {"const": "c" * 5000}}}]}, "tools", "tools[0].function.parameters"),
        ({"tools": [{"function": {"parameters": {"const": "c" * 2000}}}]}, None, None),
        ({"messages": "m" * 5000, "response_format": SMALL}, None, None),
    ],
)
def test_the_field_and_its_largest_part(body, field, part):
    found = find_too_large(json.dumps({"model": "m", **body}).encode(), 1000)
    assert (found and found.field) == field
    assert found is None or found.part.startswith(part)


@pytest.mark.parametrize(
    "data", [b"[" * 5000, b"{" * 5000, b'{"tools":' * 2000, b"\xff" * 2000, b" " * 2000, b"[]" * 999]
)
def test_what_is_no_json_is_left_to_who_parses_it(data):
    assert find_too_large(data, 1000) is None


def test_the_process_apart_says_the_same_again_and_again():
    inspector = BodyInspector(1000, ValueBounds(200, 50))

    async def check(value):
        await inspector.check(json.dumps(value).encode())

    async def run():
        await check({"prompt": "p" * 3000})
        for _ in range(2):
            with pytest.raises(RequestError, match=r"regex \(3002 bytes") as error:
                await check({"structured_outputs": {"regex": "r" * 3000}})
            assert (error.value.param, error.value.code) == ("structured_outputs.regex", "grammar_too_large")
        with pytest.raises(RequestError, match=r"^prompt holds 301 values.* 200 values .*--max-body-values") as error:
            await check({"model": "m", "prompt": [1] * 300})
        assert (error.value.param, error.value.code) == ("prompt", "too_many_values")
        with pytest.raises(RequestError, match=r"^messages holds 61 values.* 50 lists .*--max-body-objects"):
            await check({"messages": [{}] * 60, "tools": [{}] * 9})
        inspector._process.kill()
        with pytest.raises(RequestError, match="response_format"):
            await check({"response_format": {"type": "t" * 3000}})

    asyncio.run(run())
    process = inspector._process
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()


def num_values(value):
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inside))


def num_objects(value):
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, (dict, list)) + sum(map(num_objects, inside))


filled = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\,[{:\n\u00e9'),
    lambda inner: st.lists(inner, min_size=1) | st.dictionaries(st.text(alphabet='k"\\,['), inner, min_size=1),
)


@given(filled)
def test_values_are_counted_as_a_parser_would(value):
    bounds = ValueBounds(1 << 20, 1 << 20)
    for data in (json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)):
        assert count_values(data.encode(), bounds) == (num_values(value), num_objects(value))


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_no_body_within_the_bounds_by_sight_is_beyond_them(value):
    data = json.dumps(value).encode()
    if not may_exceed(data, BOUNDS):
        assert num_values(value) <= BOUNDS.max_values
        assert num_objects(value) <= BOUNDS.max_objects


@pytest.mark.parametrize(
    ("body", "field", "num"),
    [
        ({"a": 1, "prompt": [1] * 17}, None, 0),
        ({"a": 1, "prompt": [1] * 20}, "prompt", 21),
        ({"prompt": ["1,2"] * 30, "n": 1}, "prompt", 31),
        ({"zzz": {f"k{i}": i for i in range(30)}}, "zzz", 31),
        ({"prompt": "," * 100, "stop": '"[{,\\' * 100}, None, 0),
        ({"messages": [{}, {}, {}]}, None, 0),
        ({"messages": [{}, {}, {}], "tools": [{}]}, "messages", 4),
        ({"m": [[[[[[]]]]]], "n": 1}, "m", 6),
        ([1] * 30, "body", 31),
        ([[]] * 30, "body", 31),
    ],
)
def test_the_field_with_too_many_values(body, field, num):
    found = find_too_many(json.dumps(body).encode(), BOUNDS)
    assert (found and found.field) == field
    assert found is None or found.num == num


@pytest.mark.parametrize("data", [b"[" * 5000, b'{"a":' * 5000, b"," * 5000, b'{"a":[' + b'"\\",' * 5000])
def test_what_is_no_json_is_refused_by_its_look(data):
    assert find_too_many(data, BOUNDS).field == "body"


def test_the_values_of_a_body_may_be_many_texts():
    data = json.dumps({"prompt": ["a"] * 10_000}).encode()
    assert find_too_many(data, BOUNDS).num > BOUNDS.max_values
