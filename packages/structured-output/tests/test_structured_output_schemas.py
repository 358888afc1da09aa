"""Random outputs of random schemas validate, by an independent validator; what is not supported is refused by name."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import RequestError, StructuredOutputsParams
from quire_structured_output import OutputMatcher
from quire_testkit.conformance.grammar_backend import EOS, TOKENS, _encode, walk
from quire_testkit.schemas import UNSUPPORTED, keywords_of, random_schema


def outputs_of(backend, params, num_walks, jump=32):
    grammar = backend.compile(params.spec())
    for seed in range(num_walks):
        matcher = OutputMatcher(grammar.new_matcher(), EOS, None, jump)
        yield b"".join(TOKENS[i] for i in walk(matcher, len(TOKENS), seed)).decode()


def validator_of(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), compact=st.booleans(), jump=st.sampled_from([0, 32]))
def test_every_output_validates(backend, seed, compact, jump):
    schema = random_schema(seed)
    validator = validator_of(schema)
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
    for text in outputs_of(backend, params, 2, jump):
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_keywords_are_followed_or_refused_by_name(backend, name):
    schema = UNSUPPORTED[name]
    try:
        texts = list(outputs_of(backend, StructuredOutputsParams(json=schema), 8))
    except RequestError as error:
        refusal = error
    else:
        for text in texts:
            validator_of(schema).validate(json.loads(text))
        return
    assert refusal.code == "invalid_grammar"
    assert name in str(refusal), str(refusal)


def test_the_random_schemas_have_every_other_keyword():
    found = {keyword for seed in range(400) for keyword in keywords_of(random_schema(seed))}
    known = {f"format: {name}" for name in jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers}
    known |= {"$anchor", "$ref", "additionalProperties", *jsonschema.Draft202012Validator.VALIDATORS} - {"format"}
    unsupported = {name if name in known else f"format: {name}" for name in UNSUPPORTED}
    assert known - unsupported <= found, sorted(known - unsupported - found)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "date"}, ["2024-02-29", "2000-02-29", "2023-02-28"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
        ({"format": "time"}, ["23:59:59Z", "00:00:00.5+01:00"], ["23:59:60Z", "24:00:00Z"]),
        ({"format": "date-time", "pattern": "Z$"}, ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-01-01"]),
        ({"items": {"format": "date"}}, [["2024-02-29"]], [["2023-02-29"]]),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, [[], [None, None]], [1]),
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"not": {}}}, [{"a": None}], [{"b": None}]),
        ({"enum": [1 << 53, -(1 << 53)]}, [1 << 53, -(1 << 53)], [9]),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_schemas_are_followed_to_the_letter(backend, schema, good, bad):
    validator = validator_of(schema)
    grammar = backend.compile(StructuredOutputsParams(json=schema).spec())
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    within = backend.compile(StructuredOutputsParams(structural_tag=tag).spec())
    for value, is_good in [(each, True) for each in good] + [(each, False) for each in bad]:
        assert validator.is_valid(value) <= is_good  # the year 0 is only left out
        for each in (grammar, within):
            matcher = each.new_matcher()
            taken = all(matcher.accept(token_id) for token_id in _encode(json.dumps(value)))
            assert (taken and matcher.accept(EOS[0])) == is_good, value


def test_integers_that_the_library_cannot_tell_apart_are_refused(backend):
    for schema in ({"const": {"id": (1 << 53) + 1}}, {"items": {"enum": ["a", [-123456789012345678]]}}):
        with pytest.raises(RequestError, match=r"beyond 2\*\*53"):
            backend.compile(StructuredOutputsParams(json=schema).spec())


@pytest.mark.parametrize(
    "pattern", ['^[^"]{3}$', r"^[^\\]{3}$", r'^a[^x"\\]{2}$', r"^[^\d]{3}$", "^[^a]{3}$", r"^[^\n]{3}$"]
)
def test_what_a_class_excludes_cannot_be_escaped_in(backend, pattern):
    schema = {"type": "string", "pattern": pattern}
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    wanted = (StructuredOutputsParams(json=schema), StructuredOutputsParams(structural_tag=tag))
    grammars = [backend.compile(each.spec()) for each in wanted]
    for piece in ('"', "\\", "\n", "x", "3", "b", "é"):
        text = json.dumps(f"a{piece}b", ensure_ascii=False)
        for grammar in grammars:
            matcher = grammar.new_matcher()
            if all(matcher.accept(token_id) for token_id in _encode(text)) and matcher.accept(EOS[0]):
                validator_of(schema).validate(json.loads(text))


def test_objects_may_be_closed(backend):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "$defs": {"x": {"properties": {"b": {}}}}}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert {"".join(text.split()) for text in outputs_of(backend, params, 12)} == {"{}", '{"a":null}'}
    kept = StructuredOutputsParams(json={**schema, "additionalProperties": True}, disable_additional_properties=True)
    grammar = backend.compile(kept.spec())
    matcher = grammar.new_matcher()
    assert all(matcher.accept(token_id) for token_id in [TOKENS.index(b'{"'), TOKENS.index(b"b")])


NAMES = (*(f"p{number}" for number in range(1996)), "größe", "two words", 'a"b', "a\\b")


def test_a_thousand_optional_properties_may_come_in_any_order(backend):
    values = ({"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "format": "date"}, {"type": "null"})
    properties = {name: {**values[number % 3], "title": name} for number, name in enumerate(NAMES)}
    wide = {"type": "object", "properties": properties, "required": ["p7"], "additionalProperties": False}
    schema = {"$ref": "#/$defs/wide", "$defs": {"wide": wide}}
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    texts = [*outputs_of(backend, params, 8)]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in texts:
        validator.validate(json.loads(text))
    assert any(len(json.loads(text)) > 1 for text in texts)
    matcher = backend.compile(params.spec()).new_matcher()
    text = json.dumps({"p7": "2024-02-29", 'a"b': 3, "p0": 9, "a\\b": "2023-12-31"}, separators=(",", ":"))
    validator.validate(json.loads(text))
    assert all(matcher.accept(token_id) for token_id in _encode(text))
    assert matcher.accept(EOS[0])


def test_a_thousand_different_optional_properties_are_named(backend):
    wide = {"type": "object", "properties": {name: {"const": name} for name in NAMES}}
    with pytest.raises(RequestError, match=r"\$\.items\.properties \(2000 keys") as error:
        backend.compile(StructuredOutputsParams(json={"type": "array", "items": wide, "minItems": 1}).spec())
    assert error.value.code == "grammar_too_large"


def test_properties_that_are_pointed_to_or_merged_stay_where_they_are(backend):
    properties = {f"p{number}": {"type": "null"} for number in range(110)}
    pointed = {"properties": {"q": {"$ref": "#/properties/p109"}, **properties}, "required": ["q"]}
    merged = {"allOf": [{"properties": properties}, {"properties": properties, "required": ["p2"]}]}
    for schema in ({"type": "object", "additionalProperties": False, **each} for each in (pointed, merged)):
        if "allOf" in schema:
            schema["properties"] = properties
        for text in outputs_of(backend, StructuredOutputsParams(json=schema), 2):
            validator_of(schema).validate(json.loads(text))


def test_deep_text_is_refused(backend):
    deep = "{}"
    for _ in range(20_000):
        deep = '{"items":' + deep + "}"
    with pytest.raises(RequestError) as error:
        backend.compile(StructuredOutputsParams(json=deep).spec())
    assert error.value.param == "structured_outputs.json"
    assert error.value.code == "grammar_too_large"
