"""Values of parameters that are written as plain text: JSON of the type asked for, and the model's own value."""

from __future__ import annotations

import json

import pytest

from quire_renderers.tool_schemas import ToolSchemas, value_as_json

OPTIONAL = frozenset({"string", "null"})


@pytest.mark.parametrize(
    "text", ["none", "None", "NULL", "Null", '"quoted"', "", " null x", "nil", "{", "1", "true", "[1]"]
)
def test_text_for_an_optional_string_is_the_text(text):
    assert json.loads(value_as_json(text, OPTIONAL, untyped="text")) == text
    assert json.loads(value_as_json(text, frozenset({"string"}), untyped="json")) == text


def test_only_null_is_null():
    assert value_as_json("null", OPTIONAL, untyped="text") == "null"
    assert value_as_json(" null\n", OPTIONAL, untyped="text") == "null"
    assert value_as_json("null", frozenset({"string"}), untyped="text") == '"null"'


@pytest.mark.parametrize(
    ("text", "types", "written"),
    [
        ("1e999", {"number"}, "1e999"),
        ("1e999", {"integer"}, "1e999"),
        ("3.0", {"integer"}, "3.0"),
        ("123456789012345678901234567890", {"integer"}, "123456789012345678901234567890"),
        ("0.1000000000000000055511151231257827", {"number"}, "0.1000000000000000055511151231257827"),
        ("1E5", {"number", "null"}, "1E5"),
        ("1" * 5000, {"integer"}, '"' + "1" * 5000 + '"'),
        ("NaN", {"number"}, '"NaN"'),
        ("-Infinity", {"number"}, '"-Infinity"'),
        ('{"a": 1, "a": 1e400}', {"object"}, '{"a": 1, "a": 1e400}'),
        (r'{"a": "\ud83d"}', {"object"}, r'{"a": "\ud83d"}'),
        (r"{'a': '\ud83d', 'b': (1e999, True, None)}", {"object"}, r'{"a": "\ud83d", "b": [1e999, true, null]}'),
        (r'["\udc00", 10000000000000000000000.10]', {"array"}, r'["\udc00", 10000000000000000000000.10]'),
        ("True", {"boolean"}, "true"),
        ("True", {"boolean", "string"}, '"True"'),
        ("true", {"boolean", "string"}, "true"),
        ("42", {"integer", "string"}, "42"),
        ("0042", {"integer", "string"}, '"0042"'),
        ('"42"', {"integer", "string"}, r'"\"42\""'),
        ('"42"', {"integer"}, r'"\"42\""'),
        ("None", {"integer", "null"}, "null"),
        ("{'a': 1}", {"string", "object"}, "\"{'a': 1}\""),
        ('{"a": 1}', {"string", "object"}, '{"a": 1}'),
        ("{1, 2}", {"object"}, '"{1, 2}"'),
        ("[1] and more", {"array"}, '"[1] and more"'),
        ("\ud83d", {"string"}, r'"\ud83d"'),
        ("\ud83d", {"integer"}, r'"\ud83d"'),
    ],
)
def test_values_are_not_rewritten(text, types, written):
    given = value_as_json(text, frozenset(types), untyped="text")
    assert given == written
    given.encode()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1e999", "1e999"),
        ('"a"', '"a"'),
        ("None", '"None"'),
        ("none", '"none"'),
        ("a b", '"a b"'),
        ("{'a': 1}", '{"a": 1}'),
    ],
)
def test_values_of_unknown_type(text, written):
    assert value_as_json(text, frozenset(), untyped="json") == written
    assert json.loads(value_as_json(text, frozenset(), untyped="text")) == text


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "int"}, {"integer"}),
        ({"type": "float"}, {"number"}),
        ({"type": ["str", "dict"]}, {"string", "object"}),
        ({"$ref": "#/$defs/a"}, {"integer"}),
        ({"$ref": "#/$defs/again"}, set()),
        ({"enum": [1, "a", None]}, {"integer", "string", "null"}),
    ],
)
def test_types_are_read_off_schemas(schema, types):
    again = [{"$ref": "#/$defs/again"}] * 3000
    parameters = {"properties": {"p": schema}, "$defs": {"a": {"type": "integer"}, "again": {"anyOf": again}}}
    tools = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.types("f", "p") == types
