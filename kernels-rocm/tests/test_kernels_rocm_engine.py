"""The whole engine with AMD's attention backends gives the tokens that it gives with the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_kernels_cuda_engine import folder, tokens

__all__ = ["folder"]  # a fixture

BACKENDS = ("triton-rocm", "sdpa-rocm")
pytestmark = pytest.mark.skipif(
    torch.version.hip is None and torch.cuda.is_available(), reason="this GPU is not AMD's, and nothing is interpreted"
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_those_of_the_reference(folder: Path, backend: str) -> None:
    settings = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 9}
    assert tokens(folder, backend, **settings) == tokens(folder, "reference", **settings)
