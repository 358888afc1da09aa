"""A real server, its engine and weights included, started with flags as vLLM's users know them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI


@pytest.fixture(scope="module")
def served(quire_serve: Any) -> Iterator[tuple[OpenAI, Any]]:
    """(client, process)."""
    overrides = ["--hf-overrides", '{"rope_theta": 20000.0, "max_position_embeddings": 1024}']
    auto = ["--max-model-len", "auto", "--num-gpu-blocks-override", "41"]
    process = quire_serve(*overrides, *auto, "--max-logprobs=-1", "--enable-force-include-usage")
    with OpenAI(base_url=f"{process.url()}/v1", api_key="none", max_retries=0) as client:
        yield client, process


def test_overridden_fields_and_the_longest_context_that_fits(served: tuple[OpenAI, Any]) -> None:
    client, process = served
    assert client.models.list().data[0].model_extra["max_model_len"] == 640  # 40 blocks of 16; one is never used
    assert "the longest that one request has memory for (auto; the model's context is 1024)" in process.output
    prompt = client.completions.create(
        model="quire-demo", prompt=[5] * 600, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert prompt.usage.total_tokens == 640


def test_log_probabilities_of_the_whole_vocabulary(served: tuple[OpenAI, Any]) -> None:
    client, _ = served
    ask = {"model": "quire-demo", "temperature": 0, "max_tokens": 2}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=-1, **ask
    )
    for token in chat.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 1280
        assert math.fsum(math.exp(each.logprob) for each in token.top_logprobs) == pytest.approx(1, abs=1e-5)
    plain = client.completions.create(prompt="Hello there", logprobs=1, extra_body={"prompt_logprobs": -1}, **ask)
    first, *rest = plain.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    assert {len(each) for each in rest} == {1280}


def test_streams_end_with_their_usage_unasked(served: tuple[OpenAI, Any]) -> None:
    client, _ = served
    ask = {"model": "quire-demo", "max_tokens": 3, "stream": True}
    messages = [{"role": "user", "content": "Hi"}]
    for stream in (
        client.chat.completions.create(messages=messages, **ask),
        client.completions.create(prompt="Hi", **ask),
    ):
        *others, last = list(stream)
        assert (last.choices, last.usage.completion_tokens) == ([], 3)
        assert all(chunk.usage is None for chunk in others)
