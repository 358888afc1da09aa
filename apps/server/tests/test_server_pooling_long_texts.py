"""Texts of megabytes on the pooling routes: refused or cut, and never tokenized to their end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire_testkit.tokenizers import sample_text

LONG = (sample_text(2000) + " ") * 150
TASKS = ["embed", "classify"]
ROUTES = {
    "/v1/embeddings": ({"input": ["a", LONG]}, "input[1]"),
    "/pooling": ({"input": LONG, "task": "classify"}, "input"),
    "/classify": ({"input": LONG}, "input"),
    "/score": ({"queries": "a", "documents": ["b", LONG]}, "documents[1]"),
    "/rerank": ({"query": LONG, "documents": ["b"]}, "query"),
    "/v2/embed": ({"texts": ["a", LONG], "truncate": "NONE"}, "texts[1]"),
    "/embed": ({"inputs": ["a", LONG]}, "inputs[1]"),
    "/predict": ({"inputs": LONG}, "inputs"),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": [LONG]}}, "inputs.sentences[0]"),
}
CUT = {
    "/v1/embeddings": {"input": LONG, "truncate_prompt_tokens": -1},
    "/score": {"queries": "a", "documents": LONG, "max_tokens_per_doc": 50},
    "/rerank": {"query": "a", "texts": [LONG], "truncate": True},
    "/v2/embed": {"texts": [LONG]},
    "/embed": {"inputs": [LONG], "truncate": True, "truncation_direction": "left"},
}


@pytest.fixture(scope="module")
def server(make_live: Any) -> Any:
    server = make_live(engine={"pooling_tasks": TASKS})
    prompts = server.llm.pooling_prompts
    prompts.spec = dataclasses.replace(prompts.spec, tasks=frozenset(TASKS))
    return server


@pytest.fixture
def num_read(server: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that was tokenized."""
    tokenizer, read = server.llm.renderer.tokenizer, list[int]()
    for owner, name in ((tokenizer, "encode_segment"), (tokenizer.part_of_text, "_encode")):
        encode = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda text, encode=encode: read.append(len(text)) or encode(text))
    return read


@pytest.mark.parametrize("path", ROUTES)
def test_what_cannot_fit_is_refused_by_its_place(server: Any, num_read: list[int], path: str) -> None:
    body, place = ROUTES[path]
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, place, "context_length_exceeded")
    assert "maximum context length is" in error["message"]
    assert "tokens, and the input has far more. Please reduce" in error["message"]
    assert sum(num_read) < 50_000 < len(LONG)


@pytest.mark.parametrize("path", CUT)
def test_what_is_cut_is_read_no_further(server: Any, num_read: list[int], path: str) -> None:
    response = server.post(path, CUT[path])
    assert response.status_code == 200, response.text
    assert sum(num_read) < 50_000


def test_others_are_answered_beside_it(server: Any, num_read: list[int]) -> None:
    answer = server.post("/v1/embeddings", {"input": ["a", LONG, "b"], "errors": "per_item"}).json()
    assert ["error" in each for each in answer["data"]] == [False, True, False]
    assert [each["embedding"] is None for each in answer["data"]] == [False, True, False]
    assert sum(num_read) < 50_000
