"""Prompts as embeddings: tokens are those of the text whose rows they are, and of Transformers from the same rows."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, ConfigError, RequestError, SamplingParams
from quire.prompt_embeds import check_prompt_embeds
from quire_models import ModelConfig
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "kv_cache_memory_bytes": 1 << 24,
    "num_threads": 1,
    "enable_prompt_embeds": True,
}


class EmbeddingModel:
    """A random checkpoint whose table of embeddings callers have, too."""

    def __init__(self, folder: Path, architecture: str, **more: Any) -> None:
        self.folder = folder
        write_tokenizer(folder, vocab_size=600)
        case = {**CASES, **MEDIA_CASES}[architecture]
        own = {"vocab_size": 608, **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))}
        fields = {**case.fields, **own, **more}
        if "text_config" in fields:
            fields = {**case.fields, "text_config": {**fields["text_config"], **own}}
        self.network = write_checkpoint(folder, architecture, dataclasses.replace(case, fields=fields))

    def rows(self, token_ids: list[int]) -> torch.Tensor:
        """What a caller takes for these tokens, [N, hidden_size]."""
        with torch.no_grad():
            embeds: torch.Tensor = self.network.get_input_embeddings()(torch.tensor(token_ids))
        return embeds

    def expected(self, embeds: torch.Tensor) -> list[int]:
        """Greedy tokens of Transformers."""
        with torch.no_grad():
            ids = self.network.generate(
                inputs_embeds=embeds[None],
                attention_mask=torch.ones(1, len(embeds), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        tokens: list[int] = ids[0].tolist()
        return tokens


def generate(llm: LLM, prompts: Any, params: SamplingParams = PARAMS) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 600, length).tolist()


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "GraniteForCausalLM", "BloomForCausalLM"],
)
def test_tokens_are_those_of_the_text_and_of_transformers(tmp_path: Path, architecture: str) -> None:
    model = EmbeddingModel(tmp_path, architecture)
    ids = [prompt_of(n, length) for n, length in enumerate((1, 9, 40))]
    rows = [model.rows(each) for each in ids]
    own = [torch.randn(each.shape, generator=torch.Generator().manual_seed(1)) * each.std() for each in rows]
    expected = [model.expected(each) for each in rows + own]
    assert len(set(map(tuple, expected))) > 3
    for settings in (
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4, "async_scheduling": True},
        {"num_gpu_blocks_override": 22, "max_model_len": 56, "block_size": 8},
    ):
        with LLM(model.folder, **{**SETTINGS, **settings}) as llm:
            assert generate(llm, [{"prompt_embeds": each} for each in rows + own]) == expected
            assert generate(llm, [{"prompt_token_ids": each} for each in ids]) == expected[:3]
            again = [{"prompt_embeds": each[None].numpy()} for each in own + rows]
            assert generate(llm, again) == expected[3:] + expected[:3]


@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_networks_with_towers_take_them_beside_media(tmp_path: Path, architecture: str) -> None:
    model = EmbeddingModel(tmp_path, architecture)
    ids = [prompt_of(n, 20) for n in range(3)]
    with LLM(model.folder, max_num_batched_tokens=33, **SETTINGS) as llm:
        assert "embeds" in llm.engine_info.modalities
        embedded = generate(llm, [{"prompt_embeds": model.rows(each)} for each in ids])
        assert embedded == generate(llm, [{"prompt_token_ids": each} for each in ids])


def test_equal_embeddings_are_cached_and_others_never(tmp_path: Path) -> None:
    model = EmbeddingModel(tmp_path, "LlamaForCausalLM")
    rows = model.rows(prompt_of(0, 48))
    other = rows.clone()
    other[0, 0] += 1e-3
    with LLM(model.folder, block_size=8, **SETTINGS) as llm:
        cached = [
            llm.generate({"prompt_embeds": each}, PARAMS, use_tqdm=False)[0].num_cached_tokens
            for each in (rows, rows, other, other)
        ]
        assert cached == [0, 40, 0, 40]
        zeros = llm.generate({"prompt_token_ids": [0] * 48}, PARAMS, use_tqdm=False)[0]
        assert zeros.num_cached_tokens == 0, "its token ids are those that stand for embeddings"
        salted = llm.generate({"prompt_embeds": rows, "cache_salt": "s"}, PARAMS, use_tqdm=False)[0]
        assert salted.num_cached_tokens == 0
        assert llm.media is not None
        gc.collect()
        llm.media.reset()
        assert llm.media.preparer.num_bytes == 0


def test_a_prompt_longer_than_an_item_and_than_what_is_kept(tmp_path: Path) -> None:
    model = EmbeddingModel(tmp_path, "LlamaForCausalLM", max_position_embeddings=1400)
    rows = torch.randn(1200, model.network.config.hidden_size) * 0.1
    longer = torch.cat((rows, rows[:30]))
    settings = {**SETTINGS, "max_model_len": 1400, "max_num_batched_tokens": 100, "encoder_cache_size": 700}
    with LLM(model.folder, **settings) as llm:
        first, second = (llm.generate({"prompt_embeds": each}, PARAMS, use_tqdm=False)[0] for each in (rows, longer))
        assert list(first.outputs[0].token_ids) == model.expected(rows)
        assert list(second.outputs[0].token_ids) == model.expected(longer)
        assert second.num_cached_tokens == 1024, "two items of 512 rows are the same"


def test_several_completions_and_their_log_probabilities(tmp_path: Path) -> None:
    model = EmbeddingModel(tmp_path, "LlamaForCausalLM")
    ids = prompt_of(3, 20)
    params = SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=6, logprobs=2, ignore_eos=True)
    with LLM(model.folder, **SETTINGS) as llm:
        embedded, text = llm.generate(
            [{"prompt_embeds": model.rows(ids), "prompt": "said"}, {"prompt_token_ids": ids}], params, use_tqdm=False
        )
        assert embedded.prompt == "said"
        assert [each.token_ids for each in embedded.outputs] == [each.token_ids for each in text.outputs]
        assert embedded.outputs[1].logprobs is not None
        beams = BeamSearchParams(beam_width=2, max_tokens=4)
        (found,) = llm.beam_search({"prompt_embeds": model.rows(ids)}, beams)
        (known,) = llm.beam_search({"prompt_token_ids": ids}, beams)
        assert [each.token_ids for each in found.outputs] == [each.token_ids for each in known.outputs]
        for complaint, wrong in (("prompt_logprobs", {"prompt_logprobs": 1}), ("1 token", {"max_tokens": 0})):
            with pytest.raises(RequestError, match=complaint):
                generate(llm, {"prompt_embeds": model.rows(ids)}, dataclasses.replace(PARAMS, **wrong))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = EmbeddingModel(tmp_path, "LlamaForCausalLM")
    rows = model.rows([5, 6, 7])
    with LLM(model.folder, **SETTINGS) as llm:
        for value, complaint in (
            (rows[:, :-1], "must be"),
            (rows.long(), "floating-point"),
            (rows * float("nan"), "finite"),
            (rows[:0], "must be"),
            ("a text", "base64"),
            (b"no file", "can be read"),
            ([[1.0]], "one tensor"),
        ):
            with pytest.raises(RequestError, match=complaint) as error:
                generate(llm, {"prompt_embeds": value})
            assert error.value.param == "prompt_embeds"
        with pytest.raises(RequestError, match="takes its place"):
            generate(llm, {"prompt_embeds": rows, "prompt_token_ids": [1]})
        with pytest.raises(RequestError, match="must be the text"):
            generate(llm, {"prompt_embeds": rows, "prompt": 3})
        with pytest.raises(RequestError, match="context"):
            generate(llm, {"prompt_embeds": rows.repeat(50, 1)})
    with LLM(model.folder, **{**SETTINGS, "enable_prompt_embeds": False}) as llm:
        assert llm.media is None
        with pytest.raises(RequestError, match="--enable-prompt-embeds"):
            generate(llm, {"prompt_embeds": rows})


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("T5ForConditionalGeneration", "encoder"), ("Gemma3ForConditionalGeneration", "for images")],
)
def test_networks_that_take_none_say_so_at_the_start(tmp_path: Path, architecture: str, reason: str) -> None:
    write_checkpoint(tmp_path, architecture, {**CASES, **MEDIA_CASES}[architecture])
    with pytest.raises(ConfigError, match=reason):
        LLM(tmp_path, **SETTINGS)


def test_networks_that_look_token_ids_up_take_none() -> None:
    case = CASES["Qwen4ExpForCausalLM"]
    fields = {**case.fields, "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text"}
    with pytest.raises(ConfigError, match="its layers look token ids up in tables of their own"):
        check_prompt_embeds(ModelConfig.from_dict(fields))
