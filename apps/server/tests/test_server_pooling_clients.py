"""Clients of embedding services, unchanged, over a real encoder; and the examples of docs/pooling.md, as they stand."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.real_checkpoints import MINILM, real_checkpoint
from quire_testkit.tokenizers import write_tokenizer

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "pooling.md").read_text(), re.DOTALL)
TEXTS = ["the quire gathers", "twelve blocks of paper", "a folded sheet"]


@pytest.fixture(scope="module")
def url(quire_serve: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    case = ENCODER_CASES["BertModel"]
    case = dataclasses.replace(case, fields={**case.fields, "vocab_size": 320})
    write_checkpoint(folder, "BertModel", case)
    write_tokenizer(folder, vocab_size=320)
    served: str = quire_serve(str(folder), "--served-model-name", "tiny").url()
    return served


@pytest.fixture(scope="module")
def vectors(url: str) -> list[list[float]]:
    answer = httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()
    return [each["embedding"] for each in answer["data"]]


def installed(*names: str) -> None:
    """Skips the calling test where a client is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"NOT TRIED WITH THE REAL CLIENT: {name} is not installed ({error})")


def run_block(number: int, url: str, **values: Any) -> dict[str, Any]:
    """What an example of the page leaves behind."""
    block = BLOCKS[number].replace("http://localhost:8000", url)
    exec(compile(block, f"docs/pooling.md, example {number}", "exec"), values)
    return values


def near(one: Sequence[Any], two: Sequence[Any]) -> None:
    for vector, other in zip(one, two, strict=True):
        assert list(vector) == pytest.approx(list(other), abs=1e-6)


def test_the_search_of_the_page_finds_what_was_put_in(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = run_block(0, url)
    assert len(page["results"]) == 3
    place = next(index for index, (name, _) in enumerate(page["paragraphs"]) if name == "sampling.md")
    score, name, text = page["search"](page["paragraphs"][place][1], top=1)[0]
    assert score == pytest.approx(1.0, abs=1e-5)
    assert (name, text) == page["paragraphs"][place]


def test_the_search_of_the_page_understands(quire_serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = quire_serve(str(real_checkpoint(MINILM))).url()
    monkeypatch.chdir(ROOT)
    names = {name for _, name, _ in run_block(0, url)["results"]}
    assert "adding-a-kernel.md" in names


def test_hugging_face_hub(url: str, vectors: list[list[float]]) -> None:
    client = InferenceClient(model=url, token="none")
    near(client.feature_extraction(TEXTS[0]), vectors[:1])
    near(client.feature_extraction(TEXTS[0], normalize=True, truncate=True, truncation_direction="left"), vectors[:1])
    similar = InferenceClient(model=f"{url}/similarity", token="none")
    assert similar.sentence_similarity(TEXTS[0], other_sentences=TEXTS)[0] == pytest.approx(1.0, abs=1e-5)


def test_cohere(url: str, vectors: list[list[float]]) -> None:
    installed("cohere")
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url)
    answer = client.embed(model="tiny", texts=TEXTS, input_type="search_document", embedding_types=["float", "int8"])
    near(answer.embeddings.float_, vectors)
    ranked = client.rerank(model="tiny", query=TEXTS[1], documents=TEXTS, top_n=2)
    assert [ranked.results[0].index, len(ranked.results)] == [1, 2]
    older = cohere.Client(api_key="none", base_url=url)
    near(older.embed(model="tiny", texts=TEXTS, input_type="search_query").embeddings, vectors)


def test_langchain(url: str, vectors: list[list[float]]) -> None:
    installed("langchain_openai", "langchain_cohere")
    page = run_block(1, url, model="tiny")
    near(page["embeddings"].embed_documents(TEXTS), vectors)
    assert page["ranking"][0]["index"] == 0


def test_llama_index(url: str, vectors: list[list[float]]) -> None:
    installed("llama_index.embeddings.openai_like")
    near(run_block(2, url, model="tiny")["embedding"].get_text_embedding_batch(TEXTS), vectors)


def test_haystack(url: str, vectors: list[list[float]]) -> None:
    installed("haystack")
    near([run_block(3, url, model="tiny")["embedder"].run(TEXTS[0])["embedding"]], vectors[:1])
