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
from quire_testkit.schemas import random_schema


def outputs_of(backend, params, num_walks, jump=32):
    grammar = backend.compile(params.spec())
    for seed in range(num_walks):
        matcher = OutputMatcher(grammar.new_matcher(), EOS, None, jump)
        yield b"".join(TOKENS[i] for i in walk(matcher, len(TOKENS), seed)).decode()


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), compact=st.booleans(), jump=st.sampled_from([0, 32]))
def test_every_output_validates(backend, seed, compact, jump):
    schema = random_schema(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
    for text in outputs_of(backend, params, 2, jump):
        validator.validate(json.loads(text))


KEYWORDS = [
    {"type": "object", "patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3, "uniqueItems": True},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"type": "array", "contains": {"const": 1}, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "null"}}, "propertyNames": {"maxLength": 3}, "maxProperties": 2},
    {"type": "object", "dependentRequired": {"a": ["b"]}, "maxProperties": 2},
    {"if": {"type": "null"}, "then": {"const": None}, "else": {"type": "boolean"}},
    {"not": {"type": "string"}, "type": ["boolean", "null"]},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
    {"type": "string", "contentEncoding": "base64", "maxLength": 4},
    {"type": "string", "format": "no-such-format"},
    {"$dynamicRef": "#x"},
    {"type": "array", "unevaluatedItems": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", KEYWORDS, ids=lambda schema: "-".join(sorted(schema)))
def test_rarer_keywords_are_followed_or_refused_by_name(backend, schema):
    validator = jsonschema.Draft202012Validator(schema)
    params = StructuredOutputsParams(json=schema)
    try:
        texts = list(outputs_of(backend, params, 8))
    except RequestError as error:
        refusal = error
    else:
        for text in texts:
            validator.validate(json.loads(text))
        return
    assert refusal.code == "invalid_grammar"
    assert any(each in str(refusal) for each in (*schema, str(schema.get("format")))), str(refusal)


@pytest.mark.parametrize(
    "pattern", ['^[^"]{3}$', r"^[^\\]{3}$", r'^a[^x"\\]{2}$', r"^[^\d]{3}$", "^[^a]{3}$", r"^[^\n]{3}$"]
)
def test_what_a_class_excludes_cannot_be_escaped_in(backend, pattern):
    grammar = backend.compile(StructuredOutputsParams(json={"type": "string", "pattern": pattern}).spec())
    validator = jsonschema.Draft202012Validator({"type": "string", "pattern": pattern})
    for piece in ('"', "\\", "\n", "x", "3", "b", "é"):
        text = json.dumps(f"a{piece}b", ensure_ascii=False)
        matcher = grammar.new_matcher()
        if all(matcher.accept(token_id) for token_id in _encode(text)) and matcher.accept(EOS[0]):
            validator.validate(json.loads(text))


def test_objects_may_be_closed(backend):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "$defs": {"x": {"properties": {"b": {}}}}}
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert {"".join(text.split()) for text in outputs_of(backend, params, 12)} == {"{}", '{"a":null}'}
    kept = StructuredOutputsParams(json={**schema, "additionalProperties": True}, disable_additional_properties=True)
    grammar = backend.compile(kept.spec())
    matcher = grammar.new_matcher()
    assert all(matcher.accept(token_id) for token_id in [TOKENS.index(b'{"'), TOKENS.index(b"b")])


def test_deep_text_is_refused(backend):
    deep = "{}"
    for _ in range(20_000):
        deep = '{"items":' + deep + "}"
    with pytest.raises(RequestError) as error:
        backend.compile(StructuredOutputsParams(json=deep).spec())
    assert error.value.param == "structured_outputs.json"
    assert error.value.code == "grammar_too_large"
