"""`StructuredOutputsParams`: exactly one kind, checked by name, and content that can be compared."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_interfaces import ReasoningSpan, RequestError, SamplingParams, StructuredOutputsParams

WRONG = [
    ({}, "structured_outputs"),
    ({"json_object": False}, "structured_outputs"),
    ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
    ({"json": "{"}, "structured_outputs.json"),
    ({"json": "[1]"}, "structured_outputs.json"),
    ({"json": 3}, "structured_outputs.json"),
    ({"json": "[" * 100_000}, "structured_outputs.json"),
    ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
    ({"regex": ""}, "structured_outputs.regex"),
    ({"regex": 3}, "structured_outputs.regex"),
    ({"grammar": ["a"]}, "structured_outputs.grammar"),
    ({"choice": []}, "structured_outputs.choice"),
    ({"choice": "yes"}, "structured_outputs.choice"),
    ({"choice": ["a", ""]}, "structured_outputs.choice"),
    ({"choice": ["a", 1]}, "structured_outputs.choice"),
    ({"json_object": 1.5}, "structured_outputs.json_object"),
    ({"json": {}, "disable_any_whitespace": "yes"}, "structured_outputs.disable_any_whitespace"),
    ({"json": {}, "disable_additional_properties": None}, "structured_outputs.disable_additional_properties"),
    ({"json": {}, "whitespace_pattern": 1}, "structured_outputs.whitespace_pattern"),
    ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "structured_outputs.whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_fields_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as error:
        StructuredOutputsParams(**fields).normalized()  # type: ignore[arg-type]
    assert error.value.param == param
    assert len(str(error.value)) < 400


def test_what_cannot_be_json_is_refused_when_it_is_written() -> None:
    params = StructuredOutputsParams(json={"const": {1, 2}})
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        params.spec()


schemas = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "string"}, {}]),
    lambda inner: st.builds(lambda items: {"type": "array", "items": items}, inner),
)


@given(schemas)
def test_text_and_object_have_the_same_content(schema: dict[str, object]) -> None:
    as_object = StructuredOutputsParams(json=schema)
    assert as_object.spec() == as_object.normalized().spec()
    assert isinstance(as_object.normalized().json, str)
    assert json.loads(as_object.spec().text) == schema
    assert hash(as_object.spec()) == hash(as_object.normalized().spec())


def test_options_are_part_of_the_content_only_of_json() -> None:
    plain = StructuredOutputsParams(json={})
    assert plain.spec() != StructuredOutputsParams(json={}, disable_any_whitespace=True).spec()
    assert plain.spec() != StructuredOutputsParams(json={}, disable_additional_properties=True).spec()
    assert plain.spec() != StructuredOutputsParams(json={}, whitespace_pattern=" ?").spec()
    regex = StructuredOutputsParams(regex="a")
    assert regex.spec() == StructuredOutputsParams(regex="a", disable_any_whitespace=True).spec()


def test_a_json_object_is_a_schema() -> None:
    assert StructuredOutputsParams(json_object=True).spec() == StructuredOutputsParams(json={"type": "object"}).spec()


def test_where_the_constraint_begins_is_not_part_of_the_content() -> None:
    span = ReasoningSpan(end_token_ids=(7,), start_token_ids=(6,))
    thinking = StructuredOutputsParams(choice=("a", "b"), reasoning=span)
    assert thinking.spec() == StructuredOutputsParams(choice=("a", "b")).spec()


@pytest.mark.parametrize("fields", [{"end_token_ids": ()}, {"end_token_ids": (-1,)}, {"end_token_ids": ("x",)}])
def test_a_span_must_end(fields: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="end_token_ids"):
        ReasoningSpan(**fields)  # type: ignore[arg-type]


def test_a_minimum_of_tokens_contradicts_a_constraint() -> None:
    constraint = StructuredOutputsParams(regex="a+")
    with pytest.raises(RequestError, match="min_tokens") as error:
        SamplingParams(structured_outputs=constraint, min_tokens=1)
    assert error.value.code == "unsupported_combination"
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
