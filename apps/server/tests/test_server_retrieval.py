"""Images as documents over HTTP: vectors and scores are those of Transformers' class."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.retrieval_models import RetrievalModel
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

QUERY = "how many coloured shapes are there"


def serving(make_live: Any, folder: Path, **settings: Any) -> Any:
    """A server of this model."""
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, **settings}
    config = QuireConfig.of(model=str(folder), **own)
    return make_live(folder=folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RetrievalModel:
    return RetrievalModel(tmp_path_factory.mktemp("retrieval"), "ColQwen2")


@pytest.fixture(scope="module")
def server(make_live: Any, model: RetrievalModel) -> Any:
    return serving(make_live, model.folder)


@pytest.fixture(autouse=True)
def nothing_held(server: Any) -> Any:
    """After each test, however its requests ended, no item is held."""
    yield
    server.wait_idle()
    gc.collect()
    server.llm.media.reset()
    assert server.llm.media.preparer.num_bytes == 0


def answered(server: Any, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Any, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def maxsim(query: Tensor, document: Tensor) -> float:
    return float((query @ document.T).max(dim=1).values.sum())


def document(number: int) -> dict[str, Any]:
    """As vLLM's clients send it."""
    return {"content": [image_part(number)]}


def test_vectors_of_images_are_those_of_transformers(model: RetrievalModel, server: Any) -> None:
    conversations = [[{"role": "user", "content": [image_part(number)]}] for number in (1, 2)]
    answer = answered(server, "/pooling", messages=conversations, task="token_embed")
    for number, item in zip((1, 2), answer["data"], strict=True):
        assert (torch.tensor(item["data"]) - model.expected(image=drawing(number))).abs().max() <= 2e-6
    answer = answered(server, "/pooling", input=QUERY, task="token_embed", prompt_name="query")
    assert (torch.tensor(answer["data"][0]["data"]) - model.expected(text=QUERY)).abs().max() <= 2e-6


def test_scores_and_ranks_of_images(model: RetrievalModel, server: Any) -> None:
    query = model.expected(text=QUERY)
    expected = [maxsim(query, model.expected(image=drawing(number))) for number in (1, 2, 3)]
    documents = [document(number) for number in (1, 2, 3)]
    scores = answered(server, "/score", queries=QUERY, documents=documents)["data"]
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-5)
    results = answered(server, "/rerank", query=QUERY, documents=documents, top_n=2)["results"]
    best = sorted(range(3), key=lambda index: -expected[index])[:2]
    assert [each["index"] for each in results] == best
    seen = {"content": [image_part(1), text_part("coloured")]}
    (backwards,) = answered(server, "/score", queries=seen, documents="how many")["data"]
    (bare,) = answered(server, "/score", queries=document(1), documents="how many")["data"]
    assert abs(backwards["score"] - bare["score"]) > 1e-3
    mixed = answered(server, "/score", queries=QUERY, documents=["a text", documents[1]])["data"]
    assert mixed[1]["score"] == pytest.approx(expected[1], abs=1e-5)


def test_what_is_no_document_is_refused(server: Any) -> None:
    broken = {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    assert refused(server, "/rerank", query=QUERY, documents=[broken])["param"].startswith("documents[0]")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert "one message" in refused(server, "/pooling", messages=turns, task="token_embed")["message"]


def test_a_model_that_generates_embeds_conversations_with_images(make_live: Any, tmp_path: Path) -> None:
    """Converted, it gives the hidden state of the last token, by Transformers' class and its processor's joint call."""
    seeing = SeeingModel(tmp_path)
    server = serving(make_live, tmp_path, runner="pooling", convert="embed")
    contents: list[list[dict[str, Any]]] = [
        [text_part("a "), image_part(1)],
        [image_part(2), text_part("b"), image_part(1)],
        [text_part("c")],
    ]
    conversations = [[{"role": "user", "content": content}] for content in contents]
    answer = answered(server, "/v1/embeddings", messages=conversations)
    texts = ["a <image>", "<image>b<image>", "c"]
    images = [[drawing(1)], [drawing(2), drawing(1)], []]
    for item, text, seen in zip(answer["data"], texts, images, strict=True):
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n"
        inputs = seeing.processor(text=[prompt], images=seen or None, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            hidden = seeing.network(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
        expected = hidden / hidden.norm()
        assert (torch.tensor(item["embedding"]) - expected).abs().max() <= 2e-6
    server.wait_idle()
    gc.collect()
    server.llm.media.reset()
    assert server.llm.media.preparer.num_bytes == 0
