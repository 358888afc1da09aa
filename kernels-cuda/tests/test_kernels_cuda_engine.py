"""The whole engine with attention in Triton gives the tokens that it gives with the reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from kernels_cuda_attention_cases import DEVICE

from quire import LLM, SamplingParams
from quire_attention import AttentionBackend
from quire_ops import op_table
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.conformance.attention_backend import AttentionBackendSuite

RANDOM = random.Random(5)
SHARED = [RANDOM.randrange(3, 250) for _ in range(20)]
PROMPTS = [[*SHARED, 7, 8, 9], SHARED, [11, 12], [RANDOM.randrange(3, 250) for _ in range(13)]]
SITUATIONS: dict[str, dict[str, Any]] = {
    "chunks of seven": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 7},
    "preempted, with drafts": {
        "num_gpu_blocks_override": 9,
        "enable_prefix_caching": False,
        "speculative_method": "ngram",
        "prompt_lookup_min": 1,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    windows = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", like="qwen3", dtype="float32", **windows)


def tokens(folder: Path, backend: str, **settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(
        folder, device=DEVICE.type, attention_backend=backend, max_model_len=64, max_num_seqs=4, **settings
    ) as llm:
        assert llm.engine_info.choices["attention"] == backend
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_tokens_are_those_of_the_reference(folder: Path, situation: str) -> None:
    settings = {"num_gpu_blocks_override": 64, **SITUATIONS[situation]}
    assert tokens(folder, "triton", **settings) == tokens(folder, "reference", **settings)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the suite's tensors are on the CPU")
class TestTritonBackend(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return AttentionBackend("triton", op_table())
