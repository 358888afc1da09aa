"""Queries and documents that are images, as vectors of their tokens: those of Transformers' classes and processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, AsyncLLM, CheckpointError, QuireConfig, RequestError
from quire_models import ModelConfig
from quire_testkit.retrieval_models import RETRIEVAL_NETWORKS, RetrievalModel
from quire_testkit.seeing_models import SeeingModel, drawing

QUERIES = ["how many coloured shapes are there", "a"]
IMAGES = [drawing(1), drawing(2, (60, 30)), drawing(3, (40, 64))]


@pytest.fixture(scope="module", params=RETRIEVAL_NETWORKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RetrievalModel:
    return RetrievalModel(tmp_path_factory.mktemp("retrieval"), request.param)


def make_llm(model: RetrievalModel, **settings: Any) -> LLM:
    own = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 24, "num_threads": 1}
    return LLM(model.folder, **{**own, **settings})


def maxsim(query: Tensor, document: Tensor) -> float:
    return float((query @ document.T).max(dim=1).values.sum())


def image_document(image: Any) -> dict[str, Any]:
    return {"multi_modal_data": {"image": image}}


def test_vectors_are_those_of_transformers(model: RetrievalModel) -> None:
    with make_llm(model) as llm:
        assert llm.engine_info.pooling_tasks == ("token_embed",)
        queries = llm.encode(QUERIES, pooling_task="token_embed", prompt_name="query", use_tqdm=False)
        documents = llm.encode([*map(image_document, IMAGES)], pooling_task="token_embed", use_tqdm=False)
    for text, output in zip(QUERIES, queries, strict=True):
        expected = model.expected(text=text)
        assert output.outputs.data.shape == expected.shape
        assert (torch.as_tensor(output.outputs.data) - expected).abs().max() <= 2e-6
    for image, output in zip(IMAGES, documents, strict=True):
        expected = model.expected(image=image)
        assert output.outputs.data.shape == expected.shape
        assert (torch.as_tensor(output.outputs.data) - expected).abs().max() <= 2e-6


def test_scores_are_by_maxsim(model: RetrievalModel) -> None:
    """Of images and of texts as documents; an image of a document is encoded once."""
    parts = {"content": [{"type": "image_pil", "image_pil": IMAGES[1]}]}
    with make_llm(model) as llm:
        documents = [image_document(IMAGES[0]), parts, "a text", image_document(IMAGES[1])]
        outputs = llm.score(QUERIES[0], documents, use_tqdm=False)
        assert llm.stats().num_encoded_items_total == {"image": 2}
        (text,) = llm.encode("a text", pooling_task="token_embed", use_tqdm=False)
    query = model.expected(text=QUERIES[0])
    vectors = [model.expected(image=IMAGES[0]), model.expected(image=IMAGES[1]), torch.as_tensor(text.outputs.data)]
    expected = [maxsim(query, document) for document in (*vectors, vectors[1])]
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)


def test_vectors_do_not_depend_on_chunks_and_neighbours(model: RetrievalModel) -> None:
    expected = [model.expected(image=image) for image in IMAGES]
    # The tokens of a prompt of ColPali all see one another, and are read at once.
    settings = {} if "paligemma" in str(model.network.config) else {"max_num_batched_tokens": 16}
    with make_llm(model, max_num_seqs=3, **settings) as llm:
        prompts = [*map(image_document, IMAGES), *QUERIES] * 2
        outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    for output, vectors in zip([*outputs[:3], *outputs[5:8]], expected * 2, strict=True):
        assert (torch.as_tensor(output.outputs.data) - vectors).abs().max() <= 2e-6


def test_a_text_beside_an_image_stands_in_the_place_of_the_processors(model: RetrievalModel) -> None:
    part, text = {"type": "image_pil", "image_pil": IMAGES[0]}, {"type": "text", "text": "beside it"}
    with make_llm(model) as llm:
        (output,) = llm.encode({"content": [part, text]}, pooling_task="token_embed", use_tqdm=False)
    own = model.processor.visual_prompt_prefix
    model.processor.visual_prompt_prefix = own.replace("Describe the image.", "beside it")
    try:
        expected = model.expected(image=IMAGES[0])
    finally:
        model.processor.visual_prompt_prefix = own
    assert (torch.as_tensor(output.outputs.data) - expected).abs().max() <= 2e-6


def test_what_is_no_document_is_refused(model: RetrievalModel) -> None:
    with make_llm(model) as llm:
        with pytest.raises(RequestError, match="text_pair goes with a prompt"):
            llm.encode({**image_document(IMAGES[0]), "text_pair": "a"}, pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(RequestError, match="takes no audio"):
            llm.encode({"multi_modal_data": {"audio": b"x"}}, pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(RequestError, match="has no task 'embed'"):
            llm.embed("a", use_tqdm=False)


async def test_a_model_that_generates_embeds_prompts_with_images(tmp_path: Path) -> None:
    """Converted, by its last token, in a process of its own and in this one; images are let go of."""
    seeing, images = SeeingModel(tmp_path), [drawing(1), drawing(2)]
    prompts = [
        {"prompt": "this <image> so", "multi_modal_data": {"image": images[0]}},
        {"prompt": "<image> and <image>", "multi_modal_data": {"image": images}},
    ]
    settings = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    served = AsyncLLM.start(QuireConfig.of(model=str(tmp_path), runner="pooling", convert="embed", **settings))
    await served.ready()
    try:
        outputs = [await served.encode(prompts[0]), *await served.encode_batch(prompts)]
        assert served.media is not None
        served.media.reset()
        assert served.media.preparer.num_bytes == 0
    finally:
        await served.shutdown()
    expected = []
    for prompt, seen in zip(prompts, (images[:1], images), strict=True):
        inputs = seeing.processor(text=[prompt["prompt"]], images=seen, return_tensors="pt")
        with torch.no_grad():
            hidden = seeing.network(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
        expected.append(hidden / hidden.norm())
    with LLM(tmp_path, runner="pooling", convert="embed", **settings) as llm:
        embedded = llm.embed(prompts, use_tqdm=False)
        with pytest.raises(RequestError, match="images stand where a prompt has the model's placeholder"):
            llm.embed(image_document(images[0]), use_tqdm=False)
    for output, vector in zip(outputs, [expected[0], *expected], strict=True):
        assert (torch.as_tensor(output.outputs.data) - vector).abs().max() <= 2e-6
    for embedding, vector in zip(embedded, expected, strict=True):
        assert (torch.tensor(embedding.outputs.embedding) - vector).abs().max() <= 2e-6


@pytest.mark.parametrize("architecture", ["ColQwen3", "ColModernVBertForRetrieval", "LlamaNemotronVLModel"])
def test_other_retrievers_are_refused_by_name(architecture: str) -> None:
    """They have a language model that would run, and a layer behind it that nobody would have asked for."""
    values = transformers.Qwen3VLConfig().to_dict() | {"architectures": [architecture]}
    with pytest.raises(CheckpointError, match=f"{architecture} is not supported: .*ColQwen2ForRetrieval"):
        ModelConfig.from_dict(values)


def test_texts_of_processors_are_read(tmp_path: Path) -> None:
    """What a checkpoint's processor writes in front of queries and images, where its file says another text."""
    model = RetrievalModel(tmp_path, "ColQwen2")
    model.processor.query_prefix = "Find: "
    model.processor.visual_prompt_prefix = "<|vision_start|><|image_pad|><|vision_end|>What is it?"
    model.processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "processor_config.json").read_text())["query_prefix"] == "Find: "
    with make_llm(model) as llm:
        (query,) = llm.encode(QUERIES[:1], pooling_task="token_embed", prompt_name="query", use_tqdm=False)
        (document,) = llm.encode([image_document(IMAGES[0])], pooling_task="token_embed", use_tqdm=False)
    for output, inputs in ((query, {"text": QUERIES[:1]}), (document, {"images": IMAGES[:1]})):
        assert [list(output.prompt_token_ids)] == model.processor(**inputs)["input_ids"].tolist()
