"""Blocks that the KV cache has no room for, in host memory: tokens are those of an engine that computes all anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, ConfigError, QuireConfig, SamplingParams
from quire_kv_transfer import HostMemoryTier
from quire_testkit.checkpoints import make_checkpoint

PROMPTS = [random.Random(seed).choices(range(3, 300), k=75) for seed in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32")


def make_llm(folder: Path, **settings: Any) -> LLM:
    """With room for little more than one prompt."""
    return LLM(folder, max_model_len=96, max_num_seqs=1, num_threads=1, num_gpu_blocks_override=8, **settings)


def generate(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids, output.num_cached_tokens


def test_evicted_blocks_come_back_from_host_memory(folder: Path) -> None:
    with make_llm(folder) as llm:
        expected = [generate(llm, prompt)[0] for prompt in PROMPTS]
        assert generate(llm, PROMPTS[0])[1] < 64, "there is no room for all"
    with make_llm(folder, kv_offloading_size=0.01) as llm:
        assert [generate(llm, prompt) for prompt in PROMPTS] == [(tokens, 0) for tokens in expected]
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert generate(llm, prompt) == (tokens, 64)
        assert "prefixes in host memory" in llm.engine_info.choices


def test_host_memory_stands_above_the_disk(folder: Path, tmp_path: Path) -> None:
    settings = {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_size": "50M"}
    with make_llm(folder, **settings) as llm:
        expected = [generate(llm, prompt)[0] for prompt in PROMPTS]
    with make_llm(folder, **settings) as llm:
        for _ in range(2):
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                assert generate(llm, prompt) == (tokens, 64)
            for path in tmp_path.rglob("*.kv"):  # now host memory has them
                path.unlink()


def lose_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemoryTier, "load", lambda self, key, buffers: False)


def test_what_does_not_arrive_is_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(folder, kv_offloading_size=0.01) as llm:
        expected = [generate(llm, prompt) for prompt in PROMPTS]
        lose_all(monkeypatch)
        assert generate(llm, PROMPTS[0]) == (expected[0][0], 0)


def test_what_does_not_arrive_fails_where_that_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(folder, kv_offloading_size=0.01, kv_load_failure_policy="fail") as llm:
        expected = [generate(llm, prompt) for prompt in PROMPTS]
        lose_all(monkeypatch)
        (output,) = llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        monkeypatch.undo()
        assert generate(llm, PROMPTS[1]) == (expected[1][0], 64)


def test_settings_that_cannot_be(folder: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        make_llm(folder, kv_offloading_size=1, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_offloading_backend must be one of native"):
        QuireConfig.of(kv_offloading_backend="lmcache")
    with pytest.raises(ConfigError, match="kv_load_failure_policy must be one of recompute, fail"):
        QuireConfig.of(kv_load_failure_policy="retry")
