"""What schemathesis breeds from the API's own schema: nothing of it may end in a 5xx, a 422 or a hang."""

from __future__ import annotations

import re

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

MODES = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]
RESTING = ("/pause", "/resume", "/sleep", "/wake_up")  # after which a server takes no requests, or takes them again
STATED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


BODIES = [
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/inference/v1/generate",
    "/v1/chat/completions/derender", "/v1/completions/derender",
]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_bodies_from_the_schema(live, path, mode):
    document = live.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path]["POST"]

    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def every_body_is_answered(case, data):
        body = case.body
        if isinstance(body, dict):
            body.pop("stream", None)  # streams are read to their end by other tests
            if isinstance(body.get("max_tokens"), int):
                body["max_tokens"] = min(body["max_tokens"], 8)
        arguments = {"content": body} if isinstance(body, (bytes, str)) else {"json": body}
        response = live.client.post(path, timeout=30, **arguments)
        assert response.status_code < 500, (body, response.text)
        assert response.status_code != 422
        if response.status_code >= 400 and response.status_code not in (413, 415):
            assert response.json()["error"]["param"], (body, response.text)

    every_body_is_answered()
    assert live.client.get("/health").status_code == 200


def test_the_document_says_what_every_route_answers(make_live):
    """Status codes, media types and bodies; of requests bred from the document, about what is there and what is not."""
    server = make_live(enable_admin_routes=True, enable_sleep_mode=True, enable_tokenizer_info_endpoint=True)
    client = server.client
    conversation = client.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]}).json()["id"]
    response = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).json()["id"]
    item = client.get(f"/v1/conversations/{conversation}/items").json()["data"][0]["id"]
    there = {"/v1/conversations/": {"id": conversation, "item": item}, "/v1/responses/": {"id": response}}
    there["/v1/models/"] = {"name": client.get("/v1/models").json()["data"][0]["id"]}
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 40
    for path, methods in schema.raw_schema["paths"].items():
        for method in methods.values():
            declared = [each["name"] for each in method.get("parameters", []) if each["in"] == "path"]
            assert declared == re.findall(r"{(\w+)}", path), path
    for operation in sorted(operations, key=lambda operation: operation.method == "delete"):
        if operation.path not in RESTING:
            _check_answers(server.url, operation, next((there[root] for root in there if root in operation.path), {}))


def _check_answers(url, operation, there):
    @given(case=operation.as_strategy(), is_there=st.booleans())
    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def every_answer_is_foreseen(case, is_there):
        if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
            case.body["max_tokens"] = min(case.body["max_tokens"], 8)
        if operation.path == "/v1/engine/events":  # an answer without end, unless one is asked for
            case.query = {**(case.query or {}), "num_events": "1"}
        if is_there and there:
            case.path_parameters.update({name: there[name] for name in case.path_parameters})
        case.validate_response(case.call(base_url=url, timeout=30), checks=STATED)

    every_answer_is_foreseen()
