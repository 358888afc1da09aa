"""Random steps for attention kernels, on the device that the tests run on; what must not be read is NaN."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from ops_layouts import Layout, grow_trees, random_layout
from torch import Tensor

from quire_ops import CACHE_TORCH_DTYPES
from quire_ops import ops as ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def cache_of(
    layout: Layout, num_blocks: int, shape: tuple[int, int], cache_dtype: str, kv_scale: Tensor | None
) -> Tensor:
    """Random keys and values of known tokens, in the format of `cache_dtype`; every other slot is NaN, or its scale is.

    shape: (Hkv, D).
    """
    num_kv_heads, head_dim = shape
    dtype = CACHE_TORCH_DTYPES[cache_dtype]
    width = {"int8": head_dim + 4, "int4": head_dim // 2 + 4}.get(cache_dtype, head_dim)
    cache = torch.full((num_blocks, 2, num_kv_heads, layout.block_size, width), 0xFF, dtype=torch.uint8)
    if dtype.is_floating_point:
        cache = torch.full(cache.shape, float("nan"), dtype=dtype)
    cache = cache.view(dtype)
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        slots = [table[p // layout.block_size] * layout.block_size + p % layout.block_size for p in range(kv_len)]
        pair = torch.randn(2, kv_len, num_kv_heads, head_dim)
        ref.write_kv_cache(pair[0], pair[1], cache, torch.tensor(slots), kv_scale)
    return cache


def on_device(layout: Layout) -> Layout:
    """The layout with its tensors on the device of the tests."""
    names = [name for name in ("block_table", "query_start_loc", "slot_mapping", "paths")
             if getattr(layout, name) is not None]  # fmt: skip
    moved = replace(layout, **{name: getattr(layout, name).to(DEVICE) for name in names})
    moved.seq_lens = layout.seq_lens.to(DEVICE)
    return moved


def check(
    attend: Any,
    lens: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    cache_dtype: str | None = None,
    kv_scale: Tensor | None = None,
    seed: int = 0,
    roots: dict[int, int] | None = None,
    **options: Any,
) -> None:
    """`attend` gives what the reference gives, on a step of sequences with lens: (tokens of the step, all tokens).

    roots: sequence -> where its tree begins, if it has one."""
    torch.manual_seed(seed)
    layout, num_blocks = random_layout(random.Random(seed), lens, block_size, shuffle=True)
    if roots:
        grow_trees(layout, roots, random.Random(seed))
    name = cache_dtype or str(dtype).removeprefix("torch.")
    cache = cache_of(layout, num_blocks, (heads[1], head_dim), name, kv_scale)
    query = torch.randn(sum(layout.query_lens), heads[0], head_dim).to(dtype)
    options = {"scale": head_dim**-0.5, "kv_scale": kv_scale, **options}
    wanted = ref.paged_attention(query, cache, layout, **options).float()
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    got = attend(query.to(DEVICE), cache.to(DEVICE), on_device(layout), **moved)
    assert got.dtype == dtype
    difference = (got.float().cpu() - wanted).abs().max()
    assert difference <= TOLERANCE[dtype] * wanted.abs().max(), difference
