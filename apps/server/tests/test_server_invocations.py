"""POST /invocations: the route that suits the body answers."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import Any

import pytest

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def pooling(make_live: Any) -> Any:
    return pooler(make_live, ["embed", "token_embed"])


def pooler(make_live: Any, tasks: list[str]) -> Any:
    server = make_live(engine={"pooling_tasks": tasks, "runner": "pooling"})
    prompts = server.llm.pooling_prompts
    prompts.spec = dataclasses.replace(prompts.spec, tasks=frozenset(tasks), labels=("dull", "bright"))
    return server


def without_ids(answer: Any) -> Any:
    if not isinstance(answer, dict):
        return answer
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a b"}),
        ("/v1/embeddings", {"input": [5, 6], "task": "embed"}),
        ("/v1/embeddings", {"messages": USER, "encoding_format": "base64"}),
        ("/pooling", {"input": ["a", "b"], "task": "token_embed"}),
        ("/rerank", {"query": "a", "documents": ["b", "c d"], "top_n": 1}),
        ("/score", {"queries": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/score", {"data_1": "a", "data_2": "b"}),
        ("/embed", {"inputs": "a"}),
    ],
)
def test_a_pooling_model_is_asked_by_fields(pooling: Any, path: str, body: dict[str, Any]) -> None:
    answer, expected = pooling.post("/invocations", body), pooling.post(path, body)
    assert (answer.status_code, expected.status_code) == (200, 200), answer.text
    assert without_ids(answer.json()) == without_ids(expected.json())


def test_a_model_of_classes_is_asked_for_them(make_live: Any) -> None:
    server = pooler(make_live, ["classify", "embed"])
    for body in ({"input": "a b"}, {"messages": USER}, {"input": "a", "task": "classify"}):
        assert server.post("/invocations", body).json()["data"][0]["label"] == "bright"
    answer = server.post("/invocations", {"input": "a", "task": "embed"}).json()
    assert answer["data"][0]["object"] == "pooling"
    assert server.post("/invocations", {"messages": USER, "model": "other"}).status_code == 404


def test_a_model_that_generates_is_asked_for_text(live: Any) -> None:
    chat = live.post("/invocations", {"messages": USER, "max_tokens": 2, "seed": 1}).json()
    assert (chat["object"], chat["usage"]["completion_tokens"]) == ("chat.completion", 2)
    text = live.post("/invocations", {"prompt": "Once", "max_tokens": 2, "seed": 1}).json()
    assert text["object"] == "text_completion"
    events = live.events("/invocations", {"messages": USER, "max_tokens": 2})
    assert events[0]["object"] == "chat.completion.chunk"
    refused = live.post("/invocations", {"input": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unsupported_task")


def test_the_body_is_checked_by_the_route_that_it_is_for(live: Any, pooling: Any) -> None:
    def param(server: Any, body: Any) -> Any:
        response = server.post("/invocations", body)
        assert response.status_code == 400, response.text
        return response.json()["error"]["param"]

    assert param(live, {"messages": USER, "temperature": -1}) == "temperature"
    assert param(live, {"prompt": 5}) == "prompt"
    assert param(pooling, {"input": ["a", 5]}) == "input"
    assert param(pooling, {"query": "a", "documents": []}) == "documents"
    assert param(pooling, {"model": "tiny"}) == "body"
    assert param(pooling, []) == "body"
    assert param(pooling, {"model": 5, "input": "a"}) == "model"


def test_compressed_bodies_and_the_header_that_names_an_adapter(pooling: Any) -> None:
    data = json.dumps({"input": "a b", "model": "tiny"}).encode()
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = pooling.client.post("/invocations", content=gzip.compress(data), headers=packed)
    assert answer.json()["model"] == "tiny"
    headers = {"x-amzn-sagemaker-adapter-identifier": "mine"}
    refused = pooling.client.post("/invocations", content=data, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    assert "'mine'" in refused.json()["error"]["message"]
