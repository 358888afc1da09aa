"""Op `paged_attention` in Triton: which launches a step needs (`attention_steps.py`), and with what."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from quire_interfaces import FEW_TOKENS
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, Platform
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.attention_kernels import attend_tiles, combine_splits
from quire_kernels_cuda.triton.attention_steps import (
    MAX_SPLITS,
    MIN_TILE,
    Lengths,
    arrival_counts,
    lengths_of,
    meta_layout,
    num_splits,
    padded,
)
from quire_ops import CACHE_TORCH_DTYPES, PagedLayout, implements, kv_cache_shape, ops
from quire_ops.kv_format import SCALE_BYTES

__all__ = ["calls", "decode_config", "paged_attention", "prefill_config"]


@implements(ops.paged_attention)
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    int8_products: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    """On any GPU of the platform."""
    query = query if query.stride(-1) == 1 else query.contiguous()
    call = _Call(
        query=query,
        kv_cache=kv_cache,
        layout=layout,
        lengths=lengths_of(layout),
        scale=float(scale),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.float(),
        kv_scale=kv_scale,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.float(),
        out=torch.empty_like(query),
        platform=platform,
        target=platform.target_of(query.device),
    )
    if call.lengths.most_of_few:
        _decode(call, triton.next_power_of_2(call.lengths.most_of_few))
    if call.lengths.has_many:
        _prefill(call)
    return call.out


class _Call(NamedTuple):
    """The arguments of one call of the op."""

    query: Tensor
    kv_cache: Tensor
    layout: PagedLayout
    lengths: Lengths
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    kv_scale: Tensor | None
    alibi_slopes: Tensor | None
    out: Tensor
    platform: Platform
    target: Target

    @property
    def num_seqs(self) -> int:
        return len(self.layout.query_lens)

    @property
    def has_row_scales(self) -> bool:
        return self.kv_cache.dtype in (torch.int8, torch.uint8)

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def queries_per_kv_head(self) -> int:
        return self.query.shape[1] // self.num_kv_heads


def decode_config(target: Target, head_dim: int, dtype: torch.dtype, *, has_row_scales: bool) -> LaunchConfig:
    """How keys are walked over where each sequence has few queries: memory counts, so small steps.

    Where blocks are smaller than steps, the compiler keeps one buffer each of keys and values, whatever the number of
    stages (the shared memory in `resources.csv`): other programs on the processor are what hides loads.

    Args:
        dtype: Of queries.
        has_row_scales: The cache is int8 or int4, whose numbers are widened in registers.
    """
    if target.has_few_registers:
        return LaunchConfig(blocks={"BLOCK_N": 16}, num_warps=8, num_stages=1)
    is_nvidia = target.vendor == "cuda"
    # On sm_80, and where keys become float32, 64 keys do not fit into registers.
    few_registers = has_row_scales and not (is_nvidia and target.has_fp8 and dtype.itemsize == 2)
    keys = 64 if head_dim <= 128 and not few_registers else 32
    stages = 3 if is_nvidia else 2
    return LaunchConfig(blocks={"BLOCK_N": keys}, num_warps=8 if has_row_scales else 4, num_stages=stages)


def prefill_config(target: Target, head_dim: int, dtype: torch.dtype, *, has_row_scales: bool) -> LaunchConfig:
    """How queries and keys are cut where there are many queries: as much as fits into registers and shared memory."""
    width = padded(head_dim)
    if target.has_few_registers:
        keys = 32 if width <= 128 and not has_row_scales else 16
        # Rows of an int8 or int4 cache are widened in registers, too.
        rows = 16 if target.holds_operands_twice and has_row_scales and width > 64 else 32
        return LaunchConfig(blocks={"BLOCK_M": rows, "BLOCK_N": keys}, num_warps=8, num_stages=1)
    if dtype == torch.float32:  # no matrix units
        return LaunchConfig(blocks={"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=2)
    rows, keys, stages, num_warps = (128 if width <= 128 else 64), (32 if has_row_scales else 64), 2, 8
    if target.vendor == "hip" and width > 128:
        keys = 32  # more would fit into shared memory, and not into registers
    if has_row_scales and target.vendor == "hip":
        rows, num_warps = 64, 4  # threads of fewer warps may have more registers
    while (rows + 2 * stages * keys) * width * dtype.itemsize > target.shared_memory_bytes and keys > 16:
        keys //= 2
    return LaunchConfig(blocks={"BLOCK_M": rows, "BLOCK_N": keys}, num_warps=num_warps, num_stages=stages)


def _config(call: _Call, kernel: str, default: LaunchConfig, sizes: dict[str, int], **traits: Any) -> LaunchConfig:
    """What `Platform.config` says; without tables for tokens in trees, whose kernel takes more shared memory."""
    if call.layout.paths is not None:
        return default
    return call.platform.config(
        kernel, call.query.device, default, sizes=sizes, **traits,
        head_dim=call.query.shape[2], queries_per_kv_head=call.queries_per_kv_head,
        kv_heads=call.num_kv_heads, block_size=call.layout.block_size,
        dtype=call.query.dtype, cache_dtype=call.kv_cache.dtype,
        sliding_window=call.sliding_window or 0, soft_cap=call.soft_cap is not None,
        sinks=call.sinks is not None, alibi=call.alibi_slopes is not None,
    )  # fmt: skip


def _decode(call: _Call, block_q: int) -> None:
    head_dim = call.query.shape[2]
    default = decode_config(call.target, head_dim, call.query.dtype, has_row_scales=call.has_row_scales)
    sizes = {"sequences": triton.next_power_of_2(call.num_seqs)}
    config = _config(call, "decode_attention", default, sizes, tokens=block_q)
    longest = call.lengths.longest
    if call.sliding_window is not None:
        longest = min(longest, call.sliding_window + config.blocks["BLOCK_N"])
    programs = call.num_seqs * call.num_kv_heads
    splits = num_splits(call.query.device, programs, longest, config.blocks["BLOCK_N"])
    part_out, part_weight, arrived = call.out, call.out, call.out  # not used without splits
    if splits > 1:
        # By sequence, not by token: beside a long prompt a row for every token would take gigabytes.
        shape = (call.num_seqs * block_q, call.query.shape[1], splits)
        part_weight = torch.empty(shape, dtype=torch.float32, device=call.query.device)
        part_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=call.query.device)
    joins = splits > 1 and call.target.vendor == "cuda"
    if joins:
        arrived = arrival_counts(call.layout, call.num_kv_heads)
    grid = (call.num_seqs, call.num_kv_heads, splits)
    block_m = max(MIN_TILE, triton.next_power_of_2(block_q * call.queries_per_kv_head))
    _attend(call, grid, (0, FEW_TOKENS), config, (part_out, part_weight, arrived), ONE_TILE_EACH=True,
            IS_SPLIT=splits > 1, JOINS=joins, BLOCK_Q=block_q, BLOCK_M=block_m)  # fmt: skip
    if splits > 1 and not joins:
        combine_splits[(call.num_seqs, call.query.shape[1], block_q)](
            part_out, part_weight, call.layout.query_start_loc, call.out, FEW_TOKENS, splits,
            call.query.shape[1], *call.out.stride()[:2], D=head_dim, D_PADDED=padded(head_dim),
            MAX_SPLITS=MAX_SPLITS, num_warps=4,
        )  # fmt: skip


def _prefill(call: _Call) -> None:
    head_dim = call.query.shape[2]
    default = prefill_config(call.target, head_dim, call.query.dtype, has_row_scales=call.has_row_scales)
    config = _config(call, "prefill_attention", default, {"tokens": triton.next_power_of_2(call.query.shape[0])})
    block_m = max(config.blocks["BLOCK_M"], triton.next_power_of_2(call.queries_per_kv_head))
    block_q = block_m // call.queries_per_kv_head
    grid = (call.query.shape[0] // block_q + call.num_seqs, call.num_kv_heads, 1)
    _attend(call, grid, (FEW_TOKENS + 1, 1 << 30), config, (call.out,) * 3, ONE_TILE_EACH=False, IS_SPLIT=False,
            JOINS=False, BLOCK_Q=block_q, BLOCK_M=block_m)  # fmt: skip


def _attend(
    call: _Call,
    grid: tuple[int, int, int],
    query_lens: tuple[int, int],
    config: LaunchConfig,
    parts: tuple[Tensor, Tensor, Tensor],
    **constants: Any,
) -> None:
    cache, row_scales, cache_format = _cache_pointers(call.kv_cache, call.target)
    row_size = call.kv_cache.shape[4] - (0 if row_scales is None else SCALE_BYTES)
    strides = call.kv_cache.stride()[:3]
    layout, head_dim = call.layout, call.query.shape[2]
    absent = call.query  # stands where there is nothing: never read
    attend_tiles[grid](
        call.query,
        cache,
        cache if row_scales is None else row_scales,
        absent if call.kv_scale is None else call.kv_scale,
        layout.block_table,
        layout.query_start_loc,
        layout.seq_lens,
        absent if call.sinks is None else call.sinks,
        absent if call.alibi_slopes is None else call.alibi_slopes,
        absent if layout.paths is None else layout.paths,
        call.out,
        *parts,
        call.num_seqs,
        grid[2],
        *query_lens,
        call.scale,
        float(call.soft_cap or 0),
        call.sliding_window or 0,
        *call.query.stride()[:2],
        *call.out.stride()[:2],
        *strides,
        row_size,
        layout.block_table.stride(0),
        0 if layout.paths is None else layout.paths.stride(0),
        NUM_HEADS=call.query.shape[1],
        G=call.queries_per_kv_head,
        D=head_dim,
        D_PADDED=padded(head_dim),
        BLOCK_SIZE=layout.block_size,
        FORMAT=cache_format,
        ALIGNMENT=1 if row_scales is None else gcd(16, row_size, *strides),
        HAS_KV_SCALE=call.kv_scale is not None and cache_format not in ("int8", "int4"),
        HAS_WINDOW=call.sliding_window is not None,
        HAS_SOFT_CAP=call.soft_cap is not None,
        HAS_SINKS=call.sinks is not None,
        HAS_SLOPES=call.alibi_slopes is not None,
        HAS_PATHS=layout.paths is not None,
        BLOCK_N=config.blocks["BLOCK_N"],
        ROWS=triton.next_power_of_2(constants["BLOCK_Q"] * call.queries_per_kv_head),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )


def _cache_pointers(kv_cache: Tensor, target: Target) -> tuple[Tensor, Tensor | None, str]:
    """The cache as the kernel takes it, its memory as float32 if rows have scales, and the name of its format."""
    if kv_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and not target.has_fp8:
        return kv_cache.view(torch.uint8), None, "e4m3 bits" if kv_cache.dtype == torch.float8_e4m3fn else "e5m2 bits"
    if kv_cache.dtype in (torch.int8, torch.uint8):
        return kv_cache, kv_cache.view(torch.float32), "int8" if kv_cache.dtype == torch.int8 else "int4"
    return kv_cache, None, "float"


_USES = (("decode", 512, 1, 64), ("decode split", 1, 1, 8192), ("prefill", 1, 512, 512), ("trees", 512, 8, 64))
"""What is special about a step, its sequences, and their tokens in the step and in all."""


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Decodes whose keys are not divided and are, a prompt, tokens in trees. See `quire_kernels_cuda.builds`."""
    if shape.latent_rank:
        return
    dtype = getattr(torch, shape.dtype)
    cache_dtype = shape.cache_dtype or shape.dtype
    row_size = shape.head_dim // (2 if cache_dtype == "int4" else 1) + (4 if cache_dtype.startswith("int") else 0)
    cache_shape = kv_cache_shape(shape.num_blocks, shape.block_size, shape.num_kv_heads, row_size)
    per_head = partial(torch.empty, shape.num_heads, dtype=torch.float32, device="meta")
    is_fp8 = cache_dtype.startswith("fp8")
    traits = [trait for trait in ("sliding_window", "soft_cap", "sinks", "alibi") if getattr(shape, trait)]
    label = " ".join([shape.dtype, *([cache_dtype] if shape.cache_dtype else []), f"d{shape.head_dim}",
                      f"h{shape.num_heads}/{shape.num_kv_heads}", *traits])  # fmt: skip
    for use, num_seqs, query_len, kv_len in _USES if shape.trees else _USES[:-1]:
        layout = meta_layout(num_seqs, query_len, kv_len, shape.block_size)
        if use == "trees":
            layout.paths = torch.empty(num_seqs * query_len, 9, dtype=torch.int32, device="meta")
        yield (
            f"{use} {label}{shape.cache_label}",
            partial(
                paged_attention,
                torch.empty(num_seqs * query_len, shape.num_heads, shape.head_dim, dtype=dtype, device="meta"),
                torch.empty(cache_shape, dtype=CACHE_TORCH_DTYPES[cache_dtype], device="meta"),
                layout,
                scale=1.0,
                sliding_window=128 if shape.sliding_window else None,
                soft_cap=50.0 if shape.soft_cap else None,
                sinks=per_head() if shape.sinks else None,
                kv_scale=torch.empty(2, shape.num_kv_heads, device="meta") if is_fp8 else None,
                alibi_slopes=per_head() if shape.alibi else None,
                platform=platform,
            ),
        )
