"""A real server, its engine and weights included, started with flags as vLLM's users know them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI


@pytest.fixture(scope="module")
def served(quire_serve: Any) -> Iterator[tuple[OpenAI, Any]]:
    """(client, process)."""
    process = quire_serve("--hf-overrides", '{"rope_theta": 20000.0, "max_position_embeddings": 1024}')
    with OpenAI(base_url=f"{process.url()}/v1", api_key="none", max_retries=0) as client:
        yield client, process


def test_overridden_fields_of_config_json(served: tuple[OpenAI, Any]) -> None:
    client, process = served
    assert client.models.list().data[0].model_extra["max_model_len"] == 1024
    assert "context 1024 tokens" in process.output
    assert client.completions.create(model="quire-demo", prompt="Hello", max_tokens=4).usage.completion_tokens
