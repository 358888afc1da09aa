"""Layers in one call give what they give one by one, and which networks' layers that are."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from torch import Tensor

from quire_models import ModelConfig, load_model
from quire_ops import OpRequest, op_table, ops
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

IN_ONE_CALL = [
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "FlexOlmoForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
]
TO_THE_BIT = [
    "BambaForCausalLM",
    "BloomForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Starcoder2ForCausalLM",
]
"""Hybrids, latent attention, layer norms, networks without a gate: each op within the call rounds as it does alone, so
that steps which verify drafts, and go op by op, leave the same states behind."""
ONE_BY_ONE = ["CohereForCausalLM", "Llama4ForCausalLM", "OlmoForCausalLM", "StableLmForCausalLM"]
"""Clipped queries, factors of queries, chunks, layer norms of heads: op `decoder_stack` has no fields for these."""

served = op_table().choose(ops.decoder_stack, OpRequest(device="cpu", dtype=torch.float32))
pytestmark = pytest.mark.skipif(served.name == "reference", reason="no backend takes a whole stack")


def load(architecture: str, folder: Path, dtype: str = "float32") -> Any:
    write_checkpoint(folder, architecture, CASES[architecture])
    return load_model(ModelConfig.from_path(folder), folder, dtype=dtype)


def logits_both_ways(model: Any, architecture: str, cache_dtype: torch.dtype | None = None) -> list[Tensor]:
    """In one call and op by op: a prompt in two parts beside another sequence, then tokens one by one."""
    rng, stack = random.Random(architecture), model._stack
    token_ids = [rng.randrange(3, model.config.vocab_size) for _ in range(70)]
    logits = []
    for model._stack in (stack, None):
        driver = PagedDriver(model, block_size=8, shuffle=True, num_tokens=1024, cache_dtype=cache_dtype)
        seq, other = driver.add(token_ids), driver.add(token_ids[20:40])
        driver.step((seq, 33), (other, 5))
        driver.step((seq, 1), (other, 15))
        driver.run(seq, 1)
        logits.append(torch.stack(seq.logits + other.logits))
    return logits


@pytest.mark.parametrize("architecture", IN_ONE_CALL)
def test_one_call_gives_what_layers_give_one_by_one(architecture: str, tmp_path: Path) -> None:
    model = load(architecture, tmp_path)
    assert model.in_one_call
    one, other = logits_both_ways(model, architecture)
    assert (one - other).abs().max() <= 2e-5 * other.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", TO_THE_BIT)
def test_one_call_has_the_bits_of_layers_one_by_one(architecture: str, dtype: str, tmp_path: Path) -> None:
    model = load(architecture, tmp_path, dtype)
    assert model.in_one_call
    assert torch.equal(*logits_both_ways(model, architecture))


@pytest.mark.parametrize("method", ["int8", "w8a8"])
def test_attention_multiplies_in_int8_where_projections_do(method: str, tmp_path: Path) -> None:
    """Over an int8 cache; in one call and op by op, with the same bits."""
    architecture = "NemotronForCausalLM"
    case = CASES[architecture]
    fields = {**case.fields, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 dimensions
    write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields=fields))
    model: Any = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="bfloat16", linear_method=method)
    assert model.in_one_call
    assert {layer.mixer.int8_products for layer in model._stack._stack.layers} == {method == "w8a8"}
    assert torch.equal(*logits_both_ways(model, architecture, torch.int8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_in_fp8_are_read_and_written_in_one_call(dtype: str, tmp_path: Path) -> None:
    architecture = "DeepseekV3ForCausalLM"
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    model: Any = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype=dtype, kv_cache_dtype="fp8_ds_mla")
    assert model.in_one_call
    stack = model._stack
    assert torch.equal(*logits_both_ways(model, architecture))
    assert stack._reads_caches


@pytest.mark.parametrize("architecture", ONE_BY_ONE)
def test_other_layers_go_one_by_one(architecture: str, tmp_path: Path) -> None:
    assert not load(architecture, tmp_path).in_one_call
