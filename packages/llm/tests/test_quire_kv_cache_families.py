"""Narrow KV caches under attention of every kind: the same tokens in every situation of the parity harness."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire_models import ModelConfig, load_model
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.parity.situations import SITUATIONS, serve


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("Gemma2ForCausalLM", "int8"),  # soft caps, alternating windows
        ("GptOssForCausalLM", "fp8_e4m3"),  # sinks
        ("BloomForCausalLM", "fp8_e5m2"),  # slopes instead of positions
        ("Qwen3NextForCausalLM", "int4"),  # beside recurrent states, in one pool
    ],
)
def test_tokens_are_the_same_in_every_situation(architecture: str, dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    config = ModelConfig.from_path(tmp_path)
    network = load_model(config, tmp_path, dtype="float32", kv_cache_dtype=dtype)
    assert network.cache_dtype == dtype
    prompt = random.Random(architecture).choices(range(3, config.vocab_size), k=70)
    expected = serve(network, SITUATIONS["whole prefill"], prompt, 32)
    assert len(expected["greedy"].token_ids) == len(expected["seeded"].token_ids) == 32
    for name, situation in SITUATIONS.items():
        seen = serve(network, situation, prompt, 32)
        for request in ("greedy", "seeded"):
            assert seen[request].token_ids == expected[request].token_ids, f"{request}, {name}"
        assert (seen["greedy"].num_cached_tokens > 0) == situation.is_warm, name
        assert seen["greedy"].num_preemptions == len(situation.preempt_after), name
