"""Encoders as models that embed: equal to Transformers, in this process and in one of their own, many texts a call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_encoder_folders import SentenceModel, write_wordpiece

from quire import LLM, AsyncLLM, ConfigError, ContextLengthError, PoolingParams, QuireConfig, RequestError
from quire_testkit.tokenizers import sample_text

TEXTS = [sample_text(number, number) for number in (1, 5, 20, 3, 60, 7, 2, 11)]
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SentenceModel:
    return SentenceModel(tmp_path_factory.mktemp("sentences"))


@pytest.fixture(scope="module")
def llm(model: SentenceModel) -> Iterator[LLM]:
    with LLM(model.folder, **SETTINGS) as llm:
        yield llm


def embeddings(outputs: list[Any]) -> torch.Tensor:
    return torch.tensor([each.outputs.embedding for each in outputs])


def test_embeddings_are_those_of_transformers(llm: LLM, model: SentenceModel) -> None:
    expected = model.mean_embeddings(TEXTS)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert torch.allclose(embeddings(outputs), expected, atol=1e-6)
    assert outputs[0].outputs.hidden_size == 64
    assert outputs[4].prompt_token_ids == model.tokenizer(TEXTS[4])["input_ids"]
    assert outputs[4].num_prompt_tokens == len(outputs[4].prompt_token_ids)
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    assert torch.equal(embeddings(llm.embed(ids, use_tqdm=False)), embeddings(outputs))
    dictionaries = [{"prompt": TEXTS[0]}, {"prompt_token_ids": ids[1]}]
    assert torch.equal(embeddings(llm.embed(dictionaries, use_tqdm=False)), embeddings(outputs[:2]))
    (one,) = llm.encode(TEXTS[2], pooling_task="embed", use_tqdm=False)
    assert torch.equal(one.outputs.data, embeddings(outputs)[2])
    tokens = llm.encode(TEXTS[:3], pooling_task="token_embed", use_tqdm=False)
    assert [tuple(each.outputs.data.shape) for each in tokens] == [(len(each), 64) for each in ids[:3]]
    plain = llm.embed(TEXTS[2], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert not torch.allclose(embeddings(plain).norm(), torch.tensor(1.0), atol=1e-2)


async def test_a_process_of_its_own_gives_the_same_bits(llm: LLM, model: SentenceModel) -> None:
    served = AsyncLLM.start(QuireConfig.of(model=str(model.folder), **SETTINGS))
    info = await served.ready()
    assert (info.runner, info.pooling_tasks) == ("pooling", ("embed", "token_embed"))
    try:
        outputs = await asyncio.gather(*[served.encode(text) for text in TEXTS])
        with pytest.raises(RequestError, match="has no task 'classify'"):
            await served.encode("a", PoolingParams(task="classify"))
        dropped = asyncio.ensure_future(served.encode(TEXTS[4]))
        await asyncio.sleep(0)
        dropped.cancel()
        assert (await served.encode("a")).error is None
    finally:
        await served.shutdown()
    assert [each.outputs.pooled for each in outputs] == [
        each.outputs.pooled for each in llm.embed(TEXTS, use_tqdm=False)
    ]


def test_truncation_counts_special_tokens(llm: LLM, model: SentenceModel) -> None:
    text = sample_text(400, 1)
    with pytest.raises(ContextLengthError, match="but this model's context is 256"):
        llm.embed(text, use_tqdm=False)
    for limit, side in ((-1, "right"), (20, "right"), (20, "left"), (10_000, "right")):
        params = PoolingParams(truncate_prompt_tokens=limit, truncation_side=side)  # type: ignore[arg-type]
        (output,) = llm.embed(text, pooling_params=params, use_tqdm=False)
        model.tokenizer.truncation_side = side
        most = min(limit if limit > 0 else 256, 256)
        assert output.prompt_token_ids == model.tokenizer(text, truncation=True, max_length=most)["input_ids"]
        model.tokenizer.truncation_side = "right"
    ids = model.tokenizer(TEXTS[4])["input_ids"]
    (output,) = llm.embed(ids, pooling_params=PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)
    assert output.prompt_token_ids == ids[:5]
    with pytest.raises(RequestError, match="no room beside the 2 special tokens"):
        llm.embed(text, pooling_params=PoolingParams(truncate_prompt_tokens=2), use_tqdm=False)


def test_a_wrong_prompt_is_named_and_others_may_be_answered(llm: LLM) -> None:
    prompts: list[Any] = ["a", [5, 9999], "b", "", sample_text(400, 1), {"text": "c"}]
    with pytest.raises(RequestError, match=r"prompts\[1\]: .*9999"):
        llm.embed(prompts, use_tqdm=False)
    outputs = llm.embed(prompts, errors="per_item", use_tqdm=False)
    assert [each.error is None for each in outputs] == [True, False, True, True, False, False]
    assert isinstance(outputs[4].error, ContextLengthError)
    assert "prompts[5]" in str(outputs[5].error)
    with pytest.raises(RequestError, match="9999"):
        _ = outputs[1].outputs
    assert outputs[2].outputs.pooled == llm.embed("b", use_tqdm=False)[0].outputs.pooled
    with pytest.raises(RequestError, match="errors must be"):
        llm.embed("a", errors="ignore", use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts came with 1 values of pooling_params"):
        llm.embed(["a", "b"], pooling_params=[PoolingParams()], use_tqdm=False)


def test_scores_of_a_model_that_embeds_are_cosines(llm: LLM, model: SentenceModel) -> None:
    vectors = model.mean_embeddings(TEXTS)
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    assert torch.allclose(torch.tensor(scores), vectors[1:] @ vectors[0], atol=1e-6)
    each = llm.score(TEXTS[:4], TEXTS[4:], use_tqdm=False)
    assert torch.allclose(
        torch.tensor([one.outputs.score for one in each]), (vectors[:4] * vectors[4:]).sum(1), atol=1e-6
    )
    with pytest.raises(RequestError, match="2 queries came with 3 documents"):
        llm.score(TEXTS[:2], TEXTS[:3], use_tqdm=False)


def test_what_an_encoder_does_not_do(llm: LLM, model: SentenceModel) -> None:
    with pytest.raises(RequestError, match="pools"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(RequestError, match="has no task 'classify'"):
        llm.classify("a", use_tqdm=False)
    with LLM(num_threads=1, max_model_len=64) as demo, pytest.raises(RequestError, match="pools nothing"):
        demo.embed("a", use_tqdm=False)
    for setting in ({"speculative_method": "ngram"}, {"enable_lora": True}, {"runner": "generate"}):
        with pytest.raises(ConfigError, match="is an encoder"):
            LLM(model.folder, **SETTINGS, **setting)


def test_what_encoders_alone_do() -> None:
    with pytest.raises(ConfigError, match=r"w8a8-g64' is for encoders alone, and .* is none; use w8a8"):
        LLM(quantization="w8a8-g64", num_threads=1, max_model_len=64)


def test_more_texts_than_a_queue_holds(model: SentenceModel, tmp_path: Path) -> None:
    settings = {"max_num_seqs": 3, "max_queued_requests": 2, "max_num_batched_tokens": 300}
    with LLM(model.folder, **SETTINGS, **settings) as llm:
        outputs = llm.embed(TEXTS * 10, use_tqdm=False)
    assert torch.allclose(embeddings(outputs), model.mean_embeddings(TEXTS).repeat(10, 1), atol=1e-6)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_cross_encoders_read_pairs(num_labels: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, num_labels=num_labels, initializer_range=0.3,
    )  # fmt: skip
    oracle = transformers.BertForSequenceClassification(config).eval()
    oracle.save_pretrained(tmp_path)
    write_wordpiece(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    def logits(first: str, second: str) -> torch.Tensor:
        with torch.inference_mode():
            inputs = tokenizer(first, second, truncation=True, max_length=64, return_tensors="pt")
            assert set(inputs["token_type_ids"][0].tolist()) == {0, 1}
            return oracle(**inputs).logits[0]

    expected = torch.stack([logits(TEXTS[3], text) for text in TEXTS])
    truncating = PoolingParams(truncate_prompt_tokens=-1)
    with LLM(tmp_path, **SETTINGS) as llm:
        if num_labels == 1:
            outputs = llm.score(TEXTS[3], TEXTS, pooling_params=truncating, use_tqdm=False)
            assert torch.allclose(
                torch.tensor([each.outputs.score for each in outputs]), expected.sigmoid()[:, 0], atol=1e-6
            )
            with pytest.raises(ContextLengthError, match=r"prompts\[4\]"):
                llm.score(TEXTS[3], TEXTS, use_tqdm=False)
        pairs = [{"prompt": TEXTS[3], "text_pair": text} for text in TEXTS]
        outputs = llm.classify(pairs, pooling_params=truncating, use_tqdm=False)
        assert outputs[0].outputs.num_classes == num_labels
        probs = expected.sigmoid() if num_labels == 1 else expected.softmax(1)
        assert torch.allclose(torch.tensor([each.outputs.probs for each in outputs]), probs, atol=1e-6)
        if num_labels == 3:
            with pytest.raises(RequestError, match="no task 'score'"):
                llm.score("a", "b", use_tqdm=False)
            with pytest.raises(RequestError, match="text_pair goes with a prompt that is text"):
                llm.classify({"prompt_token_ids": [5], "text_pair": "b"}, use_tqdm=False)


async def test_many_prompts_of_a_served_engine_with_errors_per_item(model: SentenceModel, llm: LLM) -> None:
    served = AsyncLLM.start(QuireConfig.of(model=str(model.folder), max_num_seqs=3, **SETTINGS))
    await served.ready()
    prompts: list[Any] = [*TEXTS, [5, 9999], sample_text(400, 1), *TEXTS]
    try:
        outputs = await served.encode_batch(prompts, errors="per_item")
        with pytest.raises(RequestError, match=r"prompts\[8\]: .*9999"):
            await served.encode_batch(prompts)
        assert served.client.num_requests() == 0
        with pytest.raises(RequestError, match="errors must be"):
            await served.encode_batch(prompts, errors="ignore")  # type: ignore[arg-type]
        assert await served.encode_batch([]) == []
    finally:
        await served.shutdown()
    assert [place for place, each in enumerate(outputs) if each.error is not None] == [8, 9]
    expected = [each.outputs.pooled for each in llm.embed(TEXTS, use_tqdm=False)]
    assert [each.outputs.pooled for each in outputs[:8]] == [each.outputs.pooled for each in outputs[10:]] == expected


@pytest.mark.parametrize("quantization", [None, "w8a8-g64"])
def test_the_same_bits_in_any_batch_and_order(model: SentenceModel, llm: LLM, quantization: str | None) -> None:
    texts = [sample_text(number % 37 + 1, number) for number in range(60)]
    with LLM(model.folder, quantization=quantization, **SETTINGS) as one:
        alone = [one.embed(text, use_tqdm=False)[0].outputs.pooled for text in texts]
        if quantization:
            similarity = torch.cosine_similarity(
                embeddings(one.embed(texts, use_tqdm=False)), embeddings(llm.embed(texts, use_tqdm=False))
            )
            assert 0.999 < similarity.mean() < 1 - 1e-7
            assert one.engine_info.choices["weights"] == "w8a8-g64, float32"
    chooser = random.Random(1)
    for budget in (256, 700, 8192):
        settings = {"max_num_batched_tokens": budget, "quantization": quantization, **SETTINGS}
        with LLM(model.folder, **settings) as other:
            order = chooser.sample(range(len(texts)), len(texts))
            outputs = other.embed([texts[place] for place in order], use_tqdm=False)
            assert [each.outputs.pooled for each in outputs] == [alone[place] for place in order]


def test_long_texts_in_chunks_are_averaged_by_their_tokens(model: SentenceModel) -> None:
    pooler = {"pooling_type": "MEAN", "enable_chunked_processing": True, "max_embed_len": 700}
    text = sample_text(260, 3)
    with LLM(model.folder, pooler_config=pooler, **SETTINGS) as llm:
        ids = llm.tokenizer.encode(text)
        assert 512 < len(ids) <= 700
        whole, short, tail = llm.embed([ids, TEXTS[2], ids[512:]], use_tqdm=False)
        chunks = llm.embed([ids[:256], ids[256:512], ids[512:]], use_tqdm=False)
        weights = torch.tensor([256, 256, len(ids) - 512]) / len(ids)
        assert torch.allclose(whole.outputs.data, (embeddings(chunks) * weights[:, None]).sum(0), atol=1e-6)
        assert torch.allclose(short.outputs.data, model.mean_embeddings([TEXTS[2]])[0], atol=1e-6)
        assert tail.outputs.pooled == chunks[2].outputs.pooled
        assert whole.num_prompt_tokens == len(ids)
        with pytest.raises(ContextLengthError, match="context is 256"):
            llm.encode(ids, pooling_task="token_embed", use_tqdm=False)
        with pytest.raises(ContextLengthError):
            llm.embed(ids + ids, use_tqdm=False)
        (cut,) = llm.embed(text, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
        assert cut.num_prompt_tokens == 256
        (cut,) = llm.embed(text, pooling_params=PoolingParams(truncate_prompt_tokens=300), use_tqdm=False)
        assert cut.num_prompt_tokens == 300


@pytest.mark.parametrize("in_chunks", [False, True])
def test_texts_may_be_bounded_below_what_the_network_reads(model: SentenceModel, in_chunks: bool) -> None:
    pooler = {"enable_chunked_processing": in_chunks, "max_embed_len": 20}
    text = sample_text(40, 3)
    with LLM(model.folder, pooler_config=pooler, **SETTINGS) as llm:
        assert llm.engine_info.max_embed_len == 20
        ids = llm.tokenizer.encode(text)
        assert len(ids) > 20
        with pytest.raises(ContextLengthError, match="context is 20"):
            llm.embed([ids[:20], ids[:21]], use_tqdm=False)
        for kept in (-1, 30):
            (cut,) = llm.embed(text, pooling_params=PoolingParams(truncate_prompt_tokens=kept), use_tqdm=False)
            assert cut.num_prompt_tokens == 20
        (tokens,) = llm.encode(text, pooling_task="token_embed", use_tqdm=False)
        assert tokens.outputs.data.shape[0] == len(ids)
    with LLM(model.folder, pooler_config={"max_embed_len": 5000}, **SETTINGS) as llm:
        assert llm.engine_info.max_embed_len == llm.engine_info.max_model_len


def test_a_call_of_many_texts_holds_few_at_a_time(model: SentenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model.folder, max_num_seqs=4, **SETTINGS) as llm:
        calls = llm._pooling_calls()
        rendered: list[str] = []
        render = calls.prompts.render

        def rendering(prompt: Any, *args: Any, **fields: Any) -> Any:
            rendered.append(prompt)
            return render(prompt, *args, **fields)

        monkeypatch.setattr(calls.prompts, "render", rendering)
        done: list[int] = []
        bar = type("Bar", (), {"update": lambda self, n: done.append(len(rendered)), "close": lambda self: None})
        outputs = llm.embed(TEXTS * 5, use_tqdm=lambda **_: bar())
    assert len(outputs) == len(TEXTS) * 5
    assert done[0] <= 8, "all texts were rendered before the first one had run"
