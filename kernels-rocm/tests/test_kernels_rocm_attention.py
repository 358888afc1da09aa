"""Paged attention as AMD GPUs run it, against the reference: their pieces, and their ways with 8-bit floats."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

import pytest
import torch
from kernels_cuda_attention_cases import check

from quire_kernels_cuda import sdpa
from quire_kernels_cuda.triton.attention import paged_attention, prefill_config
from quire_kernels_rocm.platform import AMD, AMD_TARGETS

LENS = [(1, 40), (12, 20), (1, 3), (3, 70)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is one target, the others are interpreted")
@pytest.mark.parametrize("target", ["gfx942", "gfx950", "gfx1100"])
@pytest.mark.parametrize("cache_dtype", [None, "fp8_e4m3", "int4"])
def test_each_kind_of_gpu(target: str, cache_dtype: str | None) -> None:
    pinned = replace(AMD, target_of=lambda _: AMD_TARGETS[target])
    kv_scale = torch.tensor([[0.02, 0.5], [0.03, 0.01]]) if cache_dtype == "fp8_e4m3" else None
    check(partial(paged_attention, platform=pinned), LENS, dtype=torch.bfloat16, cache_dtype=cache_dtype,
          kv_scale=kv_scale, sliding_window=25, sinks=torch.linspace(-1, 1, 4))  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is one target, the others are interpreted")
@pytest.mark.parametrize(("target", "head_dim", "cache_dtype"), [("gfx950", 144, None), ("gfx1100", 80, "int8")])
def test_prompts_of_wide_heads_in_smaller_pieces(target: str, head_dim: int, cache_dtype: str | None) -> None:
    """Where larger ones spilled registers to memory."""
    found = AMD_TARGETS[target]
    cut = prefill_config(found, head_dim, torch.bfloat16, has_row_scales=cache_dtype is not None)
    narrow = prefill_config(found, 64, torch.bfloat16, has_row_scales=cache_dtype is not None)
    assert prod(cut.blocks.values()) < prod(narrow.blocks.values())
    pinned = replace(AMD, target_of=lambda _: found)
    check(partial(paged_attention, platform=pinned), LENS, dtype=torch.bfloat16, head_dim=head_dim,
          cache_dtype=cache_dtype)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is one target, the others are interpreted")
@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_torch_for_prompts_and_our_kernel_for_decodes(target: str) -> None:
    pinned = replace(AMD, target_of=lambda _: AMD_TARGETS[target])
    check(partial(sdpa.paged_attention, platform=pinned), LENS, dtype=torch.bfloat16, sliding_window=19, soft_cap=4.0)


def test_on_what_there_is() -> None:
    check(partial(paged_attention, platform=AMD), LENS, dtype=torch.float16, soft_cap=3.0)
