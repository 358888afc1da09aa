"""What schemathesis breeds from the API's own schema: nothing of it may end in a 5xx, a 422 or a hang."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

MODES = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_bodies_from_the_schema(live, path, mode):
    document = live.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path]["POST"]

    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    @settings(
        max_examples=75,
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
