"""Layers in one call give what they give one by one, and which networks' layers that are."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver

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
ONE_BY_ONE = ["CohereForCausalLM", "Llama4ForCausalLM", "OlmoForCausalLM", "StableLmForCausalLM"]
"""Layer norms, clipped queries, factors of queries, chunks: op `decoder_stack` has no fields for these."""

served = op_table().choose(ops.decoder_stack, OpRequest(device="cpu", dtype=torch.float32))
pytestmark = pytest.mark.skipif(served.name == "reference", reason="no backend takes a whole stack")


def load(architecture: str, folder: Path, **options: Any) -> Any:
    write_checkpoint(folder, architecture, CASES[architecture])
    return load_model(ModelConfig.from_path(folder), folder, dtype="float32", **options)


@pytest.mark.parametrize("architecture", IN_ONE_CALL)
def test_one_call_gives_what_layers_give_one_by_one(architecture: str, tmp_path: Path) -> None:
    model = load(architecture, tmp_path)
    stack = model._stack
    assert model.in_one_call
    rng = random.Random(architecture)
    token_ids = [rng.randrange(3, model.config.vocab_size) for _ in range(70)]
    found = []
    for model._stack in (stack, None):
        driver = PagedDriver(model, block_size=8, shuffle=True, num_tokens=1024)
        seq = driver.add(token_ids)
        driver.step((seq, 33))
        driver.run(seq, 1)
        found.append(torch.stack(seq.logits))
    assert (found[0] - found[1]).abs().max() <= 2e-5 * found[1].abs().max()


@pytest.mark.parametrize("architecture", ONE_BY_ONE)
def test_other_layers_go_one_by_one(architecture: str, tmp_path: Path) -> None:
    assert not load(architecture, tmp_path).in_one_call
