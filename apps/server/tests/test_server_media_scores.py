"""Pairs and conversations with images, scored and classified over HTTP by models that see and generate."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

QUERY = "what stands here"
LISTS = (
    "{% for message in messages %}{{ {'system': 'S ', 'query': 'Q ', 'document': 'D '}.get(message.role, 'U ') }}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
"""Reads lists of parts alone."""
TEXTS = "Q {{ messages[-2].content }};D {{ messages[-1].content }};of {{ kind | default('none') }}"
"""Reads texts alone, with placeholders in them."""
FALSE, TRUE = "n", "y"


def serving(make_live: Any, folder: Path, **settings: Any) -> Any:
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, **settings}
    config = QuireConfig.of(model=str(folder), **own)
    return make_live(
        folder=folder,
        factory=REAL_FACTORY,
        engine=config.to_dict(),
        config=own,
        trust_request_chat_template=True,
    )


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"), LISTS)


@pytest.fixture(scope="module")
def reranker(make_live: Any, seeing: SeeingModel) -> Any:
    """As vLLM's users start Qwen3-VL-Reranker."""
    overrides = {
        "architectures": ["LlavaForSequenceClassification"],
        "classifier_from_token": [FALSE, TRUE],
        "is_original_qwen3_reranker": True,
    }
    return serving(make_live, seeing.folder, hf_overrides=overrides)


def nothing_held(server: Any) -> None:
    server.wait_idle()
    gc.collect()
    server.llm.media.reset()
    assert server.llm.media.preparer.num_bytes == 0


def answered(server: Any, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def last_hidden(seeing: SeeingModel, prompt: str, *images: int) -> Tensor:
    seen = [drawing(number) for number in images]
    inputs = seeing.processor(text=[prompt], images=seen or None, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        return seeing.network(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]


def expected_score(seeing: SeeingModel, prompt: str, *images: int) -> float:
    """The probability of yes against no behind a prompt."""
    tokenizer = seeing.processor.tokenizer
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (FALSE, TRUE)]
    with torch.no_grad():
        logits = seeing.network.lm_head(last_hidden(seeing, prompt, *images))[ids]
    return float(logits.softmax(0)[1])


def test_scores_of_pairs_with_images(seeing: SeeingModel, reranker: Any) -> None:
    documents = ["a text", {"content": [text_part("a text")]}, {"content": [image_part(1)]},
                 {"content": [text_part("this: "), image_part(2)]}]  # fmt: skip
    prompts = ["a text", "a text", "<image>", "this: <image>"]
    seen = [(), (), (1,), (2,)]
    expected = [
        expected_score(seeing, f"Q {QUERY};D {prompt};", *images) for prompt, images in zip(prompts, seen, strict=True)
    ]
    answer = answered(reranker, "/score", queries=QUERY, documents=documents)
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=2e-6)
    ranked = answered(reranker, "/rerank", query=QUERY, documents=documents)["results"]
    assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(
        dict(enumerate(expected)), abs=2e-6
    )
    assert answer["usage"]["prompt_tokens"] > 0
    query = {"content": [image_part(3), text_part("b")]}
    (both,) = answered(reranker, "/score", queries=query, documents=documents[3:])["data"]
    assert both["score"] == pytest.approx(expected_score(seeing, "Q <image>b;D this: <image>;", 3, 2), abs=2e-6)
    nothing_held(reranker)


def test_a_template_that_reads_texts_gets_placeholders(seeing: SeeingModel, reranker: Any) -> None:
    body = {"queries": QUERY, "chat_template": TEXTS, "chat_template_kwargs": {"kind": "two"}}
    documents = ["a text", {"content": [image_part(1), text_part("a text")]}]
    answer = answered(reranker, "/score", documents=documents, **body)
    expected = [
        expected_score(seeing, f"Q {QUERY};D a text;of two"),
        expected_score(seeing, f"Q {QUERY};D <image>\na text;of two", 1),
    ]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=2e-6)
    nothing_held(reranker)


def test_a_wrong_image_of_a_pair_is_named(reranker: Any) -> None:
    broken = {"content": [text_part("a"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    response = reranker.post("/score", {"queries": QUERY, "documents": ["a", broken]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "documents[1].content[1]")
    assert error["message"].startswith("documents[1]")
    response = reranker.post("/score", {"queries": broken, "documents": ["a"]})
    assert response.json()["error"]["param"] == "queries.content[1]"
    nothing_held(reranker)


def test_classes_of_conversations_with_images(make_live: Any, tmp_path: Path) -> None:
    """`--convert classify` of a checkpoint with a layer `score`."""
    seeing = SeeingModel(tmp_path, LISTS)
    tensors = load_file(tmp_path / "model.safetensors")
    size = seeing.network.config.text_config.hidden_size
    score = torch.randn(3, size, generator=torch.Generator().manual_seed(2))
    save_file({**tensors, "score.weight": score}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    labels = {str(number): name for number, name in enumerate(("circle", "square", "none"))}
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "id2label": labels}))
    server = serving(make_live, tmp_path, runner="pooling", convert="classify")
    contents = [[text_part("a "), image_part(1)], [text_part("c")], [image_part(2), image_part(1)]]
    prompts, seen = ["U a <image>;", "U c;", "U <image><image>;"], [(1,), (), (2, 1)]
    messages = [[{"role": "user", "content": content}] for content in contents]
    answer = answered(server, "/classify", messages=messages)
    for item, prompt, images in zip(answer["data"], prompts, seen, strict=True):
        expected = (score @ last_hidden(seeing, prompt, *images)).softmax(0)
        assert (torch.tensor(item["probs"]) - expected).abs().max() <= 2e-6
        assert item["label"] == labels[str(int(expected.argmax()))]
    nothing_held(server)
