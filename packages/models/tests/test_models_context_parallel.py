"""Networks whose KV cache is interleaved over ranks give the logits of one rank. Ranks are threads here."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from torch import Tensor

from quire_distributed import Collectives, run_thread_ranks
from quire_models import ModelConfig, load_model
from quire_models.sharding import interleave
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

KINDS = [
    "BambaForCausalLM",  # attention beside Mamba-2, which stays as it is
    "BloomForCausalLM",  # linear biases of the heads' scores
    "DeepseekV3ForCausalLM",  # latent attention
    "FalconForCausalLM",  # one key-value head
    "Gemma2ForCausalLM",  # soft caps; every other layer has a window
    "GptOssForCausalLM",  # sinks; every other layer has a window
    "MptForCausalLM",
    "Olmo2ForCausalLM",  # a norm over all heads at once, so that each rank has all of them
    "Qwen3NextForCausalLM",  # gated attention beside gated delta nets
]

SMALL = {"initializer_range": 0.1}
"""Weights with which another order of sums moves logits by less than the tolerance: attention by torch on one rank by
1.3e-6. By default it moves them by 9e-6."""


def run(folder: Path, *, tp_group: Collectives, dcp_size: int, block_size: int = 8, **options: Any) -> Tensor:
    """Logits [N, vocab_size] of a prefill beside a chunked one, chunks of one token, and decode steps of both."""
    config = ModelConfig.from_path(folder)
    config = dataclasses.replace(config, network=interleave(config.network, dcp_size))
    model = load_model(config, folder, tp_group=tp_group, **options)
    driver = PagedDriver(model, block_size=block_size, shuffle=True)
    rng = random.Random(3)
    first, second, third = (driver.add([rng.randrange(3, 60) for _ in range(length)]) for length in (37, 29, 9))
    driver.step((third, 1))
    driver.step((third, 1), (first, 30), (second, 4))
    driver.step((first, 1), (second, 16), (third, 1))
    for _ in range(4):
        driver.step((first, 1), (second, 1), (third, 1))
    return torch.stack([*first.logits, *second.logits, *third.logits])


def agree(folder: Path, size: int, dcp_size: int, tolerance: float = 1e-5, **options: Any) -> None:
    """Hold the logits of every rank to those of one rank."""
    (alone,) = run_thread_ranks(1, lambda group: run(folder, tp_group=group, dcp_size=1, **options))
    for logits in run_thread_ranks(size, lambda group: run(folder, tp_group=group, dcp_size=dcp_size, **options)):
        assert (logits - alone).abs().max() <= tolerance
        assert torch.equal(logits.argmax(-1), alone.argmax(-1))


@pytest.mark.parametrize("architecture", KINDS)
def test_logits_are_those_of_one_rank(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    agree(tmp_path, 2, 2, dtype="float32")


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("size", "dcp_size", "block_size"), [(2, 2, 2), (4, 2, 4), (4, 4, 4), (3, 3, 6), (6, 3, 6)])
def test_every_split_of_heads_and_tokens(
    num_kv_heads: int, size: int, dcp_size: int, block_size: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": num_kv_heads}
    tiny_hf_checkpoint(tmp_path, "llama", **sizes, **SMALL)
    agree(tmp_path, size, dcp_size, dtype="float32", block_size=block_size)


def test_latents_of_four_ranks_are_interleaved_twice(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "DeepseekV3ForCausalLM", CASES["DeepseekV3ForCausalLM"])
    for cache_dtype in (None, "fp8_ds_mla"):
        agree(tmp_path, 4, 2, dtype="float32", kv_cache_dtype=cache_dtype)
