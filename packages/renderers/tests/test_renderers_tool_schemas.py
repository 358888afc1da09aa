"""Values that models write as plain text become JSON of the type that the tool's schema allows."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire_renderers.tool_schemas import ToolSchemas, value_as_json

KINDS = {"null": type(None), "boolean": bool, "integer": int, "number": float, "object": dict, "array": list}
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
kinds = st.sampled_from(sorted(KINDS))


def kind_of(value):
    return next((kind for kind, of in KINDS.items() if type(value) is of), "string")


@settings(deadline=None)
@given(value=values, others=st.frozensets(kinds))
def test_json_of_an_allowed_type_is_that_value(value, others):
    kind = kind_of(value)
    if kind == "string":
        return
    written = value_as_json(json.dumps(value), others | {kind}, untyped="text")
    assert json.loads(written) == value
    assert type(json.loads(written)) is type(value)


@settings(deadline=None)
@given(value=values)
def test_python_of_an_allowed_type_is_that_value(value):
    kind = kind_of(value)
    # Strings in double quotes are read as JSON first, which has no such escapes: a path with backslashes keeps them.
    assume('"' not in repr(value) or not any(escape in repr(value) for escape in ("\\x", "\\U")))
    if kind != "string":
        assert json.loads(value_as_json(repr(value), frozenset({kind}), untyped="text")) == value


@settings(deadline=None)
@given(text=st.text(), untyped=st.sampled_from(("text", "json")))
def test_a_string_is_the_text_whatever_it_looks_like(text, untyped):
    assert json.loads(value_as_json(text, frozenset({"string"}), untyped=untyped)) == text


@settings(deadline=None)
@given(text=st.text(max_size=20), types=st.frozensets(st.one_of(kinds, st.just("string"))))
def test_every_text_becomes_json(text, types):
    value = json.loads(value_as_json(text, types, untyped="json"))
    if isinstance(value, str):
        assert value == text
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        assert not types or kind_of(value) in types or (number and types & {"integer", "number"})


@settings(deadline=None)
@given(value=scalars.filter(lambda value: not isinstance(value, str)))
def test_without_a_schema_the_format_decides(value):
    text = json.dumps(value)
    assert json.loads(value_as_json(text, frozenset(), untyped="json")) == value
    assert json.loads(value_as_json(text, frozenset(), untyped="text")) == text


def types_of(schema, **more):
    tools = ToolSchemas([{"name": "f", "parameters": {"properties": {"x": schema}, **more}}])
    return tools.types("f", "x")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "str"}, {"string"}),
        ({"type": "list", "nullable": True}, {"array", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "string"}, {"const": 1.5}]}, {"string", "number"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"type": ["string", "null"]}, {}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"array"}),
        ({"$ref": "#/$defs/itself"}, set()),
        ({"$ref": "#/$defs/absent"}, set()),
        ({"$ref": "elsewhere.json"}, set()),
        ("nonsense", set()),
    ],
)
def test_types_of_a_parameter(schema, types):
    definitions = {"a": {"type": "array"}, "itself": {"$ref": "#/$defs/itself"}}
    assert types_of(schema, **{"$defs": definitions}) == types


def test_parameters_that_a_tool_does_not_name():
    tools = ToolSchemas(
        [
            {
                "type": "function",
                "function": {"name": "open", "parameters": {"additionalProperties": {"type": "null"}}},
            },
            {"name": "closed", "parameters": {"properties": {"a": {}}, "additionalProperties": False}},
            {"name": "silent", "parameters": {"properties": {"a": {}}}},
            {"name": 7},
            {"name": "bare"},
        ]
    )
    assert set(tools.names) == {"open", "closed", "silent", "bare"}
    assert tools.types("open", "x") == {"null"}
    assert tools.types("unknown", "x") == set()
    has = {name: tools.has_parameter(name, "x") for name in ("open", "closed", "silent", "bare", "unknown")}
    assert has == {"open": True, "closed": False, "silent": False, "bare": True, "unknown": True}
    assert tools.has_parameter("closed", "a")
