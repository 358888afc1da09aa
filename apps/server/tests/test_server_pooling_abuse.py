"""Wrong bodies of every kind for the pooling routes: each is answered, and none by a failure of the server."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

GOOD: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a", "dimensions": None, "encoding_format": "base64"},
    "/classify": {"input": ["a", "b"]},
    "/pooling": {"input": [[5], [6]], "task": "embed", "data": None, "step_tag_id": None, "returned_token_ids": None},
    "/score": {"queries": "a", "documents": ["b", "c"], "items": None, "text_1": None, "text_2": None},
    "/rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1, "max_tokens_per_doc": 3, "texts": None},
    "/v2/embed": {"texts": ["a"], "images": None, "inputs": None, "embedding_types": ["float"], "max_tokens": 3},
    "/embed": {"inputs": ["a"], "normalize": True, "truncate": True, "prompt_name": None},
    "/embed_all": {"inputs": "a"},
    "/embed_sparse": {"inputs": "a"},
    "/predict": {"inputs": ["a", "b"], "raw_scores": True},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": True}},
    "/": {"inputs": "a"},
    "/tokenize": {"inputs": ["a"], "prompt_name": None},
    "/decode": {"ids": [5, 6], "skip_special_tokens": False},
    "/invocations": {"input": "a", "query": None, "queries": None, "inputs": None, "task": None, "data": None},
}
SHARED = (
    "model", "user", "truncate_prompt_tokens", "truncation_side", "padding", "use_activation", "normalize", "priority",
    "mm_processor_kwargs", "cache_salt", "request_id", "stream", "errors", "messages", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "embed_dtype", "endianness", "return_documents", "output_dimension",
    "instruction", "max_tokens_per_query",
)  # fmt: skip
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
IMAGE = {"content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 2**31, 2**63, 10**30, 10**400, "", "x", "NaN", "\x00", "🂡" * 400, [], [[]], [""],
    ["a", 5], [5, "a"], [[5], ["a"]], [None], [{}], {}, {"a": 1}, {"text": 5}, [{"text": "a"}], [{"role": 5}],
    [{"role": "user", "content": "a"}], [[{"role": "user", "content": None}]], [1023, 1024], [-1], [IMAGE], DEEP,
)  # fmt: skip


@pytest.fixture(scope="module")
def pooling(make_live: Any) -> Any:
    tasks = ["embed", "token_embed", "classify", "score"]
    server = make_live(engine={"pooling_tasks": tasks})
    prompts = server.llm.pooling_prompts
    prompts.spec = dataclasses.replace(prompts.spec, tasks=frozenset(tasks))
    return server


def check(server: Any, path: str, body: Any) -> None:
    response = server.post(path, body)
    assert response.status_code in (200, 400, 404), (path, body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["param"] or error["code"] == "unsupported_task", (path, body, error)
        assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize("path", GOOD)
def test_no_value_of_any_field_is_a_failure(pooling: Any, path: str) -> None:
    good = {name: value for name, value in GOOD[path].items() if value is not None}
    draw = random.Random(path)
    for name in dict.fromkeys((*GOOD[path], *SHARED)):
        for value in draw.sample(NASTY, 2 if name in SHARED else 6):
            check(pooling, path, {**good, name: value})
        check(pooling, path, {other: value for other, value in good.items() if other != name})


def test_no_mixture_of_them_is_one(pooling: Any) -> None:
    draw = random.Random(3)
    for _ in range(150):
        path = draw.choice(list(GOOD))
        body = dict(GOOD[path])
        for name in draw.sample([*body, *SHARED], 3):
            body[name] = draw.choice(NASTY)
        check(pooling, path, body)
    pooling.wait_idle()


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("data", [b"", b"[]", b'"a"', b'{"input": NaN}', b'{"input": "a"', b"\xff\xfe", b"[" * 5000])
def test_what_is_no_object_is_refused(pooling: Any, path: str, data: bytes) -> None:
    response = pooling.client.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("number", [2_000, 16_385, 60_000])
def test_many_inputs(pooling: Any, number: int) -> None:
    for path, name in (("/v1/embeddings", "input"), ("/v2/embed", "texts"), ("/embed", "inputs")):
        response = pooling.post(path, {name: ["a"] * number if number > 16_384 else [""] * number})
        assert response.status_code in (200, 400), response.text
        assert number <= 16_384 or response.status_code == 400
