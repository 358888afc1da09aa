"""What llguidance does not follow as it is, in its own terms: values that a schema allows, and none that it refuses."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire_interfaces import RequestError, StructuredOutputsParams
from quire_structured_output import OutputMatcher
from quire_structured_output.finite_patterns import finite_language
from quire_testkit.conformance.grammar_backend import EOS, TOKENS, _encode, walk

A, B = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}
BOTH = {"type": "object", "properties": {"a": A, "b": B}, "additionalProperties": False}
CARD = {"type": "object", "properties": {"t": {"const": "card", "default": "card"}, "a": A}, "required": ["a"]}
CASH = {"type": "object", "properties": {"t": {"const": "cash", "default": "cash"}, "a": A}, "required": ["a"]}
TAGGED = {
    "oneOf": [{"$ref": "#/$defs/Card"}, {"$ref": "#/$defs/Cash"}],
    "discriminator": {"propertyName": "t", "mapping": {"card": "#/$defs/Card", "cash": "#/$defs/Cash"}},
    "$defs": {"Card": CARD, "Cash": CASH},
}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        **more,
    }


CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "int64": (
        closed({"n": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}),
        [{"n": 0}, {"n": -(2**62)}, {"n": 2**62}],
        [{"n": -(2**63) - 1}, {"n": 2**63}, {"n": 0.5}],
    ),
    "int64, bounds excluded": ({"type": "integer", "exclusiveMaximum": 2**63, "exclusiveMinimum": -(2**70)}, [3], [2**63]),
    "beyond 2**53": ({"type": "integer", "minimum": 2**60 + 1}, [2**60 + 256], [2**60]),
    "bounds of doubles": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e308}, [-2.5, 10**17], ["1"]),
    "bounds as in draft 4": ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, [0.5], []),
    "unknown format": (closed({"p": {"type": "string", "format": "path", "maxLength": 2}}), [{"p": "/a"}], [{"p": "/ab"}]),
    "narrower format": ({"type": "string", "format": "iri"}, ["http://a.b"], ["no"]),
    "json-pointer": ({"type": "string", "format": "json-pointer"}, ["", "/a~1b/0"], ["a", "/~2"]),
    "pydantic's Decimal": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ["1", "-0.5", "+.5", "5."],
        ["", ".", "+", "1.2.3", "a"],
    ),
    "pydantic's Decimal of digits": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
        ["1", "-123.45", "0.5", ".25"],
        ["", ".", "a", "1.2.3"],
    ),
    "zod's email": (
        {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"},
        ["a.b@c.de"],
        [".a@b.cd", "a..b@c.de", "a@b"],
    ),
    "look-aheads": ({"type": "string", "pattern": "^(?=.*[0-9])(?=.*[a-z])[a-z0-9]{2,4}$"}, ["a1", "12ab"], ["ab", "12", "a1!"]),
    "pattern of covered names": (
        closed({"score": A}, patternProperties={"^score$": {"multipleOf": 2}}),
        [{"score": 4}],
        [{"score": 3}, {"score": 10}, {}],
    ),
    "pattern of several covered names": (
        {**BOTH, "patternProperties": {"^(?:a|b)$": True, "^x": {"type": "null"}}},
        [{"a": 1}, {"a": 1, "xy": None}],
        [{"a": True}, {"c": 1}, {"xy": 1}],
    ),
    "names that are texts": ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": A}, [{"q": 3}], [{"q": "x"}]),
    "listed names": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": A},
        [{}, {"x": 1}, {"x": 1, "y": 2}],
        [{"z": 1}, {"x": True}],
    ),
    "names by reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": A, "$defs": {"N": {"enum": ["x"]}}},
        [{"x": 1}],
        [{"z": 1}],
    ),
    "short names": ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": A}, [{"xy": 1}], [{"xyz": 1}]),
    "names in a pattern": ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": A}, [{"ab": 1}], [{"d": 1}]),
    "dependentRequired": ({**BOTH, "dependentRequired": {"a": ["b"]}}, [{}, {"b": True}, {"a": 1, "b": True}], [{"a": 1}]),
    "dependencies": ({**BOTH, "dependencies": {"a": ["b"]}}, [{}, {"a": 1, "b": True}], []),
    "dependentSchemas": ({**BOTH, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": True}, {"a": 1, "b": True}], [{"a": 1}]),
    "some property": ({**BOTH, "minProperties": 1}, [{"a": 1}, {"b": True}, {"a": 1, "b": True}], [{}]),
    "one property at most": ({**BOTH, "maxProperties": 1}, [{}, {"a": 1}, {"b": True}], [{"a": 1, "b": True}]),
    "minProperties that is there": ({**BOTH, "required": ["a"], "minProperties": 1}, [{"a": 1}], [{}]),
    "one of two properties": (
        {**BOTH, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": True}],
        [{}, {"a": 1, "b": True}],
    ),
    "tags that need not be there": (TAGGED, [{"t": "card", "a": 1}, {"t": "cash", "a": 2}], [{"t": "x", "a": 1}, {"a": 1}]),
    "a set of few": (
        {"type": "array", "items": {"enum": ["x", "y", 1]}, "uniqueItems": True, "minItems": 1},
        [["x"], ["y", "x"], [1, "y", "x"]],
        [[], ["x", "x"], ["z"]],
    ),
    "a set of booleans": ({"type": "array", "items": B, "uniqueItems": True}, [[], [True, False]], [[True, True]]),
    "a set of one at most": ({"type": "array", "items": A, "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    "contains": ({"type": "array", "contains": {"const": 5}, "items": A, "maxItems": 3}, [[5], [5, 1]], [[], [1]]),
    "minContains": ({"type": "array", "contains": A, "minContains": 2, "maxItems": 3}, [[1, 2]], [[], [1]]),
    "contains nothing": ({"type": "array", "contains": A, "minContains": 0, "maxItems": 2}, [[], ["x"]], []),
    "not of a type": ({"not": {"type": ["string", "number"]}}, [None, True, []], ["x", 1, 1.5]),
    "not of listed values": ({"enum": ["a", "b", "c"], "not": {"enum": ["b"]}}, ["a", "c"], ["b"]),
    "not with a property": ({**BOTH, "not": {"required": ["a"]}}, [{}, {"b": True}], [{"a": 1}]),
    "if without then": ({**A, "if": {"minimum": 5}}, [1, 7], [10]),
    "then without if": ({**A, "then": {"minimum": 5}}, [1], [10]),
    "unevaluatedProperties": ({"type": "object", "properties": {"a": A}, "unevaluatedProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    "unevaluatedItems": ({"type": "array", "prefixItems": [A], "unevaluatedItems": False}, [[], [1]], [[1, 1]]),
    "a dialect of one's own": ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", **A}, [1], [10]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_otherwise(backend: Any, name: str) -> None:
    schema, good, bad = CASES[name]
    grammar = backend.compile(StructuredOutputsParams(json=schema).spec())
    for value, is_good in [(each, True) for each in good] + [(each, False) for each in bad]:
        text = json.dumps(value)
        matcher = grammar.new_matcher()
        taken = all(matcher.accept(token_id) for token_id in _encode(text)) and matcher.accept(EOS[0])
        assert taken == is_good, text
    if "exclusiveMinimum" in schema and schema["exclusiveMinimum"] is True:
        return  # not of this draft
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    compact = backend.compile(params.spec())
    for seed in range(4):
        matcher = OutputMatcher(compact.new_matcher(), EOS, None, 32)
        validator.validate(json.loads(b"".join(TOKENS[i] for i in walk(matcher, len(TOKENS), seed))))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "uniqueItems": (closed({"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}), "/properties/tags/uniqueItems", "keyword uniqueItems"),
    "in a definition": ({"$ref": "#/$defs/x", "$defs": {"x": {"items": {"not": {"const": 1}}}}}, "/$defs/x/items/not", "keyword not"),
    "pattern": ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": r"^(a)\1$"}]}, "/anyOf/1/pattern", "backreferences"),
    "name with a slash": (closed({"a/b~c": {"if": {"type": "null"}, "then": {"const": 1}}}), "/properties/a~1b~0c/if", "keyword if"),
    "oneOf": ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "/items/oneOf", "oneOf is supported only"),
    "nothing fits": (closed({"a": {"type": "string", "minLength": 3, "maxLength": 2}}), "/properties/a: Unsatisfiable", "minLength"),
    "large constant": (closed({"a": {"const": 2**53 + 1}}), "/properties/a/const", "beyond 2**53"),
    "unknown type": ({"items": {"type": "strin"}}, "/items/type", "strin"),
    "reference to nowhere": (closed({"a": {"$ref": "#/$defs/nothing"}}), "/properties/a/$ref", "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_where(backend: Any, name: str) -> None:
    schema, place, reason = REFUSED[name]
    with pytest.raises(RequestError) as error:
        backend.compile(StructuredOutputsParams(json=schema).spec())
    assert f"structured_outputs.json cannot be used: at {place}" in str(error.value)
    assert reason in str(error.value)
    content = {"type": "json_schema", "json_schema": schema, "origin": "tools[3].function.parameters"}
    fine = {"type": "json_schema", "json_schema": A}
    tag = {"format": {"type": "or", "elements": [fine, {"type": "tag", "begin": "<", "content": content, "end": ">"}]}}
    with pytest.raises(RequestError) as within:
        backend.compile(StructuredOutputsParams(structural_tag=tag).spec())
    assert within.value.param == "tools[3].function.parameters"
    assert f"tools[3].function.parameters cannot be used: at {place}" in str(within.value)


def test_the_search_for_the_place_ends(backend: Any) -> None:
    wide = closed({f"p{number}": {"type": "string", "pattern": f"^a{{{number}}}$"} for number in range(500)})
    wide["properties"]["last"] = {"not": {"const": 1}}
    with pytest.raises(RequestError, match="cannot be used: at /"):
        backend.compile(StructuredOutputsParams(json=wide).spec())


def test_tools_that_are_not_strict_keep_what_can_be_followed(backend: Any) -> None:
    schema = closed({"a": {"type": "string", "pattern": r"^(?!foo)(a)\1", "maxLength": 2}}, uniqueItems=True)
    schema["x-guidance"] = {"lenient": True, "coerce_one_of": True}
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    matcher = backend.compile(StructuredOutputsParams(structural_tag=tag).spec()).new_matcher()
    assert all(matcher.accept(token_id) for token_id in _encode('{"a": "xy'))
    assert not matcher.accept(TOKENS.index(b"z"))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^a$", ["a"]),
        ("^(?:ab|c)d?$", ["ab", "abd", "c", "cd"]),
        ("^[a-c]x{1,2}$", ["ax", "axx", "bx", "bxx", "cx", "cxx"]),
        ("^$", [""]),
        (r"^\.\-$", [".-"]),
        ("a", None),
        ("^a", None),
        ("^a*$", None),
        ("^.$", None),
        ("^[^a]$", None),
        (r"^\d$", None),
        ("^(a)\\1$", None),
        ("^[a-z]{2}$", None),
        ("^(", None),
        ("^(?i:a)$", None),
    ],
)
def test_finite_languages(pattern: str, texts: list[str] | None) -> None:
    assert finite_language(pattern, 64) == texts
