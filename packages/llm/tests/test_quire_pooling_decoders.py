"""Decoders that pool: in chunks, behind cached prefixes, after preemptions, beside generation, with adapters."""

from __future__ import annotations

import asyncio
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from llm_published_folders import write_network, write_qwen_tokenizer

from quire import LLM, AsyncLLM, ConfigError, PoolingParams, QuireConfig, RequestError, SamplingParams
from quire.assemble import read_model_config
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.tokenizers import sample_text

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 1 << 24}
TEXTS = [sample_text(number, number) for number in (40, 1, 90, 3, 25, 7)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("decoder") / "model", like="qwen3")


def hidden_states(folder: Path, llm: LLM, texts: list[str]) -> list[torch.Tensor]:
    """[tokens, hidden_size] of each text by itself, behind the last norm, as Transformers has them."""
    network = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [network(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0] for text in texts]


def vectors(outputs: list[Any]) -> torch.Tensor:
    return torch.stack([each.outputs.data for each in outputs])


def normalized(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.stack(rows), dim=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, convert="embed", max_num_batched_tokens=32, **SETTINGS) as llm:
        yield llm


def test_the_last_token_in_chunks_and_behind_cached_prefixes(folder: Path, llm: LLM) -> None:
    info = llm.engine_info
    assert (info.runner, info.pooling_tasks, info.cached_pooling_tasks) == (
        "pooling", ("embed", "token_embed"), ("embed",)
    )  # fmt: skip
    assert not any("LM head" in what for what in info.memory_bytes)
    assert sum("the last token is taken" in note for note in info.extra["notes"]) == 1
    hidden = hidden_states(folder, llm, TEXTS)
    first = llm.embed(TEXTS, use_tqdm=False)
    assert torch.allclose(vectors(first), normalized([each[-1] for each in hidden]), atol=1e-5)
    again = llm.embed(TEXTS, use_tqdm=False)
    assert again[2].num_cached_tokens > 64
    assert [each.outputs.pooled for each in again] == [each.outputs.pooled for each in first]
    tokens = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    assert {each.num_cached_tokens for each in tokens} == {0}
    for output, each in zip(tokens, hidden, strict=True):
        assert torch.allclose(output.outputs.data, torch.nn.functional.normalize(each, dim=1), atol=1e-5)
    with pytest.raises(RequestError, match="generates no text"):
        llm.generate("a", use_tqdm=False)


def test_the_mean_survives_preemption_and_one_step_ahead(folder: Path) -> None:
    settings = SETTINGS | {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 12, "max_model_len": 128}
    settings |= {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 8}
    pooler = {"pooling_type": "mean"}
    for ahead in (False, True):
        with LLM(
            folder,
            runner="pooling",
            pooler_config=pooler,
            async_scheduling=ahead,
            **settings,
        ) as llm:
            texts = [sample_text(35, number) for number in range(9)] + TEXTS[3:]
            hidden = hidden_states(folder, llm, texts)
            outputs = llm.embed(texts, use_tqdm=False)
            assert torch.allclose(vectors(outputs), normalized([each.mean(0) for each in hidden]), atol=1e-5)
            assert llm.engine_info.cached_pooling_tasks == ()
            assert llm.stats().num_preemptions_total > 0


def test_embeddings_beside_generation(folder: Path) -> None:
    with LLM(folder, **SETTINGS) as plain:
        expected = [each.outputs[0].token_ids for each in plain.generate(TEXTS, GREEDY, use_tqdm=False)]
        with pytest.raises(RequestError, match="pools nothing"):
            plain.embed("a", use_tqdm=False)
    with LLM(folder, convert="embed", **SETTINGS) as pooling:
        embeddings = [each.outputs.pooled for each in pooling.embed(TEXTS, use_tqdm=False)]

    async def both() -> None:
        settings = SETTINGS | {"runner": "generate", "convert": "embed", "max_num_batched_tokens": 48}
        served = AsyncLLM.start(QuireConfig.of(model=str(folder), **settings))
        await served.ready()

        async def generate(text: str) -> list[int]:
            return [token_id async for each in served.generate(text, GREEDY) for token_id in each.outputs[0].token_ids]

        try:
            generating = [asyncio.ensure_future(generate(text)) for text in TEXTS]
            await asyncio.sleep(0.1)
            pooled = await asyncio.gather(*[served.encode(text) for text in [*TEXTS, "a"]])
            assert [each.outputs.pooled for each in pooled[:-1]] == embeddings
            assert await asyncio.gather(*generating) == expected
        finally:
            await served.shutdown()

    asyncio.run(both())


def test_a_sentence_transformers_folder_pools_by_itself(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(tmp_path, **SETTINGS) as llm:
        assert llm.engine_info.runner == "pooling"
        assert "modules.json" in llm.engine_info.choices["runner"]
        (plain, query, document) = (
            llm.embed("some text", prompt_name=name, use_tqdm=False)[0] for name in (None, "query", "document")
        )
        assert query.prompt_token_ids == llm.tokenizer.encode("Find: some text")
        assert plain.prompt_token_ids == document.prompt_token_ids == llm.tokenizer.encode("some text")
        with pytest.raises(RequestError, match="no prompt 'other'; it has 'query', 'document'"):
            llm.embed("some text", prompt_name="other", use_tqdm=False)
        (hidden,) = hidden_states(folder, llm, ["some text"])
        assert torch.allclose(plain.outputs.data, hidden[-1], atol=1e-4), "modules.json has no Normalize"


def test_settings_that_cannot_be(folder: Path) -> None:
    with pytest.raises(ConfigError, match="only converted it pools"):
        LLM(folder, runner="pooling", convert="none", **SETTINGS)
    with pytest.raises(ConfigError, match="has no field"):
        LLM(folder, runner="pooling", pooler_config={"pool": "mean"}, **SETTINGS)


def test_a_bad_pooling_request_fails_alone(llm: LLM) -> None:
    params = [PoolingParams(), PoolingParams(dimensions=8), PoolingParams()]
    outputs = llm.embed(["a", "b", "c"], pooling_params=params, errors="per_item", use_tqdm=False)
    assert [each.error is None for each in outputs] == [True, False, True]
    assert "dimensions" in str(outputs[1].error)


def test_the_same_bits_in_any_batch_order_and_chunking(folder: Path, llm: LLM) -> None:
    assert llm.engine_info.batch_invariant
    texts = [sample_text(number % 29 + 1, number) for number in range(24)]
    alone = [llm.embed(text, use_tqdm=False)[0].outputs.pooled for text in texts]
    chooser = random.Random(1)
    for budget in (7, 100, 2048):
        with LLM(folder, convert="embed", max_num_batched_tokens=budget, max_num_seqs=5, **SETTINGS) as other:
            order = chooser.sample(range(len(texts)), len(texts))
            outputs = other.embed([texts[place] for place in order], use_tqdm=False)
            assert [each.outputs.pooled for each in outputs] == [alone[place] for place in order]


def test_generative_rerankers_answer_by_rows_of_the_lm_head(folder: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    overrides = {"classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}
    with LLM(folder, runner="pooling", hf_overrides=overrides, **SETTINGS) as llm:
        assert set(llm.engine_info.pooling_tasks) == {"classify", "score"}
        no, yes = (llm.tokenizer.encode(word, add_special_tokens=False) for word in ("n", "y"))
        outputs = llm.score("a query", TEXTS, chat_template=template, use_tqdm=False)
        texts = [f"<query>a query<document>{text}" for text in TEXTS]
        assert [each.prompt_token_ids for each in outputs] == [llm.tokenizer.encode(text) for text in texts]
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for text, output in zip(texts, outputs, strict=True):
            with torch.inference_mode():
                logits = network(torch.tensor([llm.tokenizer.encode(text)])).logits[0, -1]
            expected = torch.softmax(logits[[no[0], yes[0]]], 0)[1]
            assert output.outputs.score == pytest.approx(float(expected), abs=1e-5)
        with pytest.raises(RequestError, match="give a chat_template"):
            llm.score("a query", TEXTS, use_tqdm=False)
    with pytest.raises(ConfigError, match="tokens; it must be one"):
        LLM(folder, runner="pooling", hf_overrides={"classifier_from_token": ["n", "certainly not"]}, **SETTINGS)


@pytest.mark.parametrize("name", ["task", "pooling_task"])
def test_classes_of_texts_by_token_where_the_server_asks_for_them(name: str, tmp_path: Path) -> None:
    network = write_network(tmp_path, "Qwen3ForSequenceClassification", "Qwen3ForCausalLM", num_labels=3)
    write_qwen_tokenizer(tmp_path, ends=False)
    with LLM(tmp_path, pooler_config={name: "token_classify"}, max_num_batched_tokens=16, **SETTINGS) as llm:
        assert llm.engine_info.pooling_tasks == ("token_classify", "classify")
        (tokens,) = llm.encode(TEXTS[0], use_tqdm=False)
        (whole,) = llm.classify(TEXTS[0], use_tqdm=False)
        ids = torch.tensor([llm.tokenizer.encode(TEXTS[0])])
    with torch.inference_mode():
        expected = network.score(network.model(ids).last_hidden_state[0]).softmax(1)
    assert (tokens.outputs.data - expected).abs().max() < 2e-6
    assert (torch.tensor(whole.outputs.probs) - expected[-1]).abs().max() < 2e-6
    with pytest.raises(ConfigError, match="task must be one of this model's, classify; is 'embed'"):
        LLM(tmp_path, pooler_config={"task": "embed"}, **SETTINGS)


def test_adapters_change_embeddings(folder: Path, tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks Transformers for what is to go away
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        tuned = peft.get_peft_model(network, config)
        tuned.save_pretrained(tmp_path / "adapter")
        merged = tuned.merge_and_unload().model.eval()
    with LLM(folder, convert="embed", enable_lora=True, max_lora_rank=8, **SETTINGS) as llm:
        llm.load_adapter("tuned", str(tmp_path / "adapter"))
        outputs = llm.embed(TEXTS + TEXTS, lora_request=["tuned"] * len(TEXTS) + [None] * len(TEXTS), use_tqdm=False)
        plain = normalized([each[-1] for each in hidden_states(folder, llm, TEXTS)])
        with torch.inference_mode():
            changed = [merged(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0, -1] for text in TEXTS]
    assert torch.allclose(vectors(outputs[len(TEXTS) :]), plain, atol=1e-5)
    assert torch.allclose(vectors(outputs[: len(TEXTS)]), normalized(changed), atol=1e-5)
    assert not torch.allclose(plain, normalized(changed), atol=1e-2)
    with LLM(folder, convert="embed", **SETTINGS) as llm, pytest.raises(RequestError, match="serves no adapters"):
        llm.embed("a", lora_request="tuned", use_tqdm=False)


def test_classes_of_a_converted_network_are_those_of_the_overrides(folder: Path) -> None:
    """`hf_overrides` names them, or how many there are; a network that is not converted refuses what it does not
    read."""

    def labels(convert: str = "classify", **fields: Any) -> tuple[str, ...]:
        config = QuireConfig.of(model=str(folder), convert=convert, hf_overrides=fields)
        return read_model_config(config, folder).labels

    assert labels(id2label={"0": "dull", "1": "bright", "2": "loud"}) == ("dull", "bright", "loud")
    assert labels(num_labels=3) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert labels() == ("LABEL_0", "LABEL_1")
    for convert in ("auto", "embed"):
        with pytest.raises(ConfigError, match="num_labels"):
            labels(convert, num_labels=3)
    config = QuireConfig.of(model=str(folder), runner="generate", convert="classify", hf_overrides={"num_labels": 3})
    with pytest.raises(ConfigError, match="num_labels"):
        read_model_config(config, folder)
