"""Schemas in large bodies stay text, and mean the same."""

from __future__ import annotations

import dataclasses
import json

import pytest

from quire_interfaces import RequestError
from quire_server.body import SMALL_BYTES, parse_body
from quire_server.protocol import ChatCompletionRequest
from quire_server.schema_text import SchemaText, decode_around_schemas
from quire_server.structured import structured_outputs_of

SCHEMA = {"type": "object", "properties": {'quo"teé😀': {"enum": [1.5, None, "}", "\\"]}}}
PLACES = [
    {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": None}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
    {"guided_json": SCHEMA},
]


def parsed(body, size):
    text = json.dumps({"messages": [{"role": "user", "content": "x" * size}], **body}).encode()
    return parse_body(text, ChatCompletionRequest)


@pytest.mark.parametrize("body", PLACES, ids=lambda body: next(iter(body)))
def test_the_constraint_is_the_same(body):
    small, large = (parsed(body, size) for size in (1, SMALL_BYTES))
    assert large.messages[0]["content"] == "x" * SMALL_BYTES
    expected, found = structured_outputs_of(small), structured_outputs_of(large)
    assert type(found.json) is str
    assert json.loads(found.json) == SCHEMA
    assert dataclasses.replace(found, json=SCHEMA) == expected


def test_only_schemas_stay_text():
    value = decode_around_schemas(json.dumps({**PLACES[0], **PLACES[1], "tools": [SCHEMA], "n": 1}).encode())
    assert isinstance(value["structured_outputs"].pop("json"), SchemaText)
    assert isinstance(value["response_format"]["json_schema"].pop("schema"), SchemaText)
    assert value == {
        "structured_outputs": {"whitespace_pattern": None},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True}},
        "tools": [SCHEMA],
        "n": 1,
    }


@pytest.mark.parametrize("schema", ["null", "[1]", "5", '"text"'])
def test_what_is_no_object_is_refused_alike(schema):
    def refusal(size):
        text = f'{{"messages": [{{"role": "user", "content": "{"x" * size}"}}], "response_format": {{"type": '
        text += f'"json_schema", "json_schema": {{"schema": {schema}}}}}}}'
        with pytest.raises(RequestError) as error:
            structured_outputs_of(parse_body(text.encode(), ChatCompletionRequest))
        return str(error.value), error.value.param

    assert refusal(1) == refusal(SMALL_BYTES)


@pytest.mark.parametrize(
    "data", [b'{"guided_json": {"a": }}', b'{"a": 1', b'{"guided_json": {"a\xff": 1}}', b'[{"a": tru}]']
)
def test_what_is_no_json_is_refused(data):
    with pytest.raises(RequestError, match="not valid JSON") as error:
        parse_body(data + b" " * SMALL_BYTES, ChatCompletionRequest)
    assert error.value.code == "invalid_json"
