"""Latent attention in Triton, over all of a sequence or over slots that were chosen: which launches, and with what.

Launches are those of `attention_steps.py`: sequences with few tokens in the step, whose keys may be divided among
several programs, and the others. Shapes are in `quire_ops.kv_cache_ops`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from quire_interfaces import FEW_TOKENS, FP8_DS_MLA, latent_row_bytes
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, Platform
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.attention_kernels import combine_splits
from quire_kernels_cuda.triton.attention_steps import (
    MAX_SPLITS,
    MIN_TILE,
    lengths_of,
    meta_layout,
    num_splits,
    padded,
)
from quire_kernels_cuda.triton.latent_kernels import (
    attend_latents,
    attend_slots,
    write_fp8_rows_kernel,
    write_rows_kernel,
)
from quire_ops import CACHE_TORCH_DTYPES, PagedLayout, implements, ops

__all__ = ["calls", "latent_attention", "latent_config", "sparse_latent_attention", "write_latent_cache"]


@implements(ops.write_latent_cache)
def write_latent_cache(entries: Tensor, latent_cache: Tensor, slot_mapping: Tensor, rank: int = 0) -> None:
    if not entries.numel():
        return
    entries = entries if entries.stride(-1) == 1 else entries.contiguous()
    size = entries.shape[1]
    if latent_cache.dtype == torch.uint8:
        write_fp8_rows_kernel[(entries.shape[0],)](
            entries, latent_cache, slot_mapping, latent_cache.shape[1],
            entries.stride(0), *latent_cache.stride()[:2],
            R=rank, P=size - rank, P_PADDED=padded(size - rank), num_warps=4,
        )  # fmt: skip
    else:
        write_rows_kernel[(entries.shape[0],)](
            entries, latent_cache, slot_mapping, latent_cache.shape[1], size,
            entries.stride(0), *latent_cache.stride()[:2],
            BLOCK=triton.next_power_of_2(size), num_warps=2,
        )  # fmt: skip


def latent_config(target: Target, rank: int, dtype: torch.dtype, fp8: bool) -> LaunchConfig:
    """BLOCK_M: queries times heads of a tile, the sum of whose values takes most of the registers; BLOCK_N: keys, which
    are widened in registers if fp8."""
    if target.vendor == "hip":
        return LaunchConfig(blocks={"BLOCK_M": 16, "BLOCK_N": 16}, num_warps=4, num_stages=1)
    if dtype == torch.float32:  # no matrix units
        return LaunchConfig(blocks={"BLOCK_M": 16, "BLOCK_N": 16}, num_warps=8, num_stages=2)
    keys = 32 if padded(rank) > 256 else 64
    if fp8:  # a second stage spills, and what is widened takes shared memory twice
        keys = keys if target.shared_memory_bytes > 100 * 1024 else keys // 2
        return LaunchConfig(blocks={"BLOCK_M": 32, "BLOCK_N": keys}, num_warps=8, num_stages=1)
    return LaunchConfig(blocks={"BLOCK_M": 32, "BLOCK_N": keys}, num_warps=8, num_stages=2)


class _Call(NamedTuple):
    """What all launches of one call of an op get."""

    query: Tensor
    cache: Tensor
    scale: float
    rank: int
    config: LaunchConfig
    out: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of the kernels."""
        rest = self.query.shape[2] - self.rank
        return {"R": self.rank, "R_PADDED": padded(self.rank), "P": rest, "P_PADDED": padded(rest),
                "BLOCK_SIZE": self.cache.shape[1], "FP8": self.cache.dtype == torch.uint8,
                "BLOCK_N": self.config.blocks["BLOCK_N"],
                "num_warps": self.config.num_warps, "num_stages": self.config.num_stages}  # fmt: skip

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.query.stride()[:2], *self.cache.stride()[:2])

    def parts(self, num_rows: int, splits: int) -> tuple[Tensor, Tensor]:
        """Where the results of splits go, of sequences times tokens of a tile; without splits, what is not written
        to."""
        if splits == 1:
            return self.out, self.out
        shape = (num_rows, self.query.shape[1], splits)
        weights = torch.empty(shape, dtype=torch.float32, device=self.query.device)
        return torch.empty((*shape, self.rank), dtype=torch.float32, device=self.query.device), weights

    def combine(self, parts: tuple[Tensor, Tensor], query_start_loc: Tensor, most_tokens: int) -> None:
        num_seqs, num_heads, splits = query_start_loc.shape[0] - 1, self.query.shape[1], parts[1].shape[2]
        combine_splits[(num_seqs, num_heads, most_tokens)](
            *parts, query_start_loc, self.out, FEW_TOKENS, splits, num_heads, *self.out.stride()[:2],
            D=self.rank, D_PADDED=padded(self.rank), MAX_SPLITS=MAX_SPLITS, num_warps=16 if self.rank > 256 else 4,
        )  # fmt: skip


def _call(query: Tensor, cache: Tensor, scale: float, rank: int, platform: Platform) -> _Call:
    query = query if query.stride(-1) == 1 else query.contiguous()
    config = latent_config(platform.target_of(query.device), rank, query.dtype, cache.dtype == torch.uint8)
    out = torch.empty((*query.shape[:2], rank), dtype=query.dtype, device=query.device)
    return _Call(query, cache, float(scale), rank, config, out)


@implements(ops.latent_attention)
def latent_attention(
    query: Tensor,
    latent_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    rank: int,
    platform: Platform = NVIDIA,
) -> Tensor:
    call = _call(query, latent_cache, scale, rank, platform)
    if layout.paths is not None:  # the search on paths takes shared memory too
        call = call._replace(config=replace(call.config, blocks={**call.config.blocks, "BLOCK_N": 16}, num_stages=1))
    lengths, num_seqs, num_heads = lengths_of(layout), len(layout.query_lens), query.shape[1]
    rows, keys = call.config.blocks["BLOCK_M"], call.config.blocks["BLOCK_N"]
    most_heads = triton.next_power_of_2(num_heads)
    if lengths.most_of_few:
        block_q = triton.next_power_of_2(lengths.most_of_few)
        block_h = max(min(most_heads, rows // block_q), MIN_TILE // block_q)
        pieces = triton.cdiv(num_heads, block_h)
        splits = num_splits(query.device, num_seqs * pieces, lengths.longest, keys)
        parts = call.parts(num_seqs * block_q, splits)
        _attend(call, layout, (num_seqs, pieces, splits), (0, FEW_TOKENS), parts,
                ONE_TILE_EACH=True, IS_SPLIT=splits > 1, BLOCK_Q=block_q, BLOCK_H=block_h)  # fmt: skip
        if splits > 1:
            call.combine(parts, layout.query_start_loc, block_q)
    if lengths.has_many:
        block_h = min(most_heads, rows)
        block_q = rows // block_h
        grid = (query.shape[0] // block_q + num_seqs, triton.cdiv(num_heads, block_h), 1)
        _attend(call, layout, grid, (FEW_TOKENS + 1, 1 << 30), call.parts(0, 1),
                ONE_TILE_EACH=False, IS_SPLIT=False, BLOCK_Q=block_q, BLOCK_H=block_h)  # fmt: skip
    return call.out


def _attend(
    call: _Call,
    layout: PagedLayout,
    grid: tuple[int, int, int],
    query_lens: tuple[int, int],
    parts: tuple[Tensor, Tensor],
    **constants: Any,
) -> None:
    paths = layout.query_start_loc if layout.paths is None else layout.paths
    attend_latents[grid](
        call.query, call.cache, layout.block_table, layout.query_start_loc, layout.seq_lens, paths, call.out, *parts,
        len(layout.query_lens), grid[2], *query_lens, call.query.shape[1], call.scale, *call.strides,
        layout.block_table.stride(0), paths.stride(0), HAS_PATHS=layout.paths is not None, **call.sizes, **constants,
    )  # fmt: skip


@implements(ops.sparse_latent_attention)
def sparse_latent_attention(
    query: Tensor,
    latent_cache: Tensor,
    slots: Tensor,
    *,
    scale: float,
    rank: int,
    platform: Platform = NVIDIA,
) -> Tensor:
    call = _call(query, latent_cache, scale, rank, platform)
    num_tokens, num_heads = query.shape[:2]
    if not num_tokens:
        return call.out
    slots = slots.contiguous()
    block_h = max(min(triton.next_power_of_2(num_heads), call.config.blocks["BLOCK_M"]), MIN_TILE)
    pieces, num_slots = triton.cdiv(num_heads, block_h), slots.shape[1]
    splits = num_splits(query.device, num_tokens * pieces, num_slots, call.config.blocks["BLOCK_N"])
    parts = call.parts(num_tokens, splits)
    attend_slots[(num_tokens, pieces, splits)](
        call.query, call.cache, slots, call.out, *parts, num_slots, splits, num_heads, call.scale, *call.strides,
        slots.stride(0), IS_SPLIT=splits > 1, BLOCK_H=block_h, **call.sizes,
    )  # fmt: skip
    if splits > 1:
        each = torch.arange(num_tokens + 1, dtype=torch.int32, device=query.device)
        call.combine(parts, each, 1)
    return call.out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Decodes whose keys are divided and are not, of tokens in trees, a prompt, chosen slots, and the rows' writing."""

    if not shape.latent_rank or platform.target_of(torch.device("meta")).has_few_registers:
        return
    dtype, rank, heads = CACHE_TORCH_DTYPES[shape.dtype], shape.latent_rank, shape.num_heads
    label = f"{shape.dtype} r{rank} h{heads}{shape.cache_label}"

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    options: dict[str, Any] = {"scale": 1.0, "rank": rank, "platform": platform}
    slots, plain = empty(16, 2048, dtype=torch.int64), empty(shape.num_blocks, shape.block_size, rank + 64)
    row_bytes = latent_row_bytes(FP8_DS_MLA, rank + 64, rank)
    fp8 = empty(shape.num_blocks, shape.block_size, row_bytes, dtype=torch.uint8)
    # Rows in fp8 once for each way of reading them: trees, prompts and large caches differ in nothing that meets them.
    kinds = [(label, plain)] if shape.large_cache else [(label, plain), (f"{label} fp8", fp8)]
    for kind, cache in kinds:
        yield kind, partial(write_latent_cache, plain[0], cache, slots[:, 0], rank)
        yield kind, partial(sparse_latent_attention, empty(16, heads, rank + 64), cache, slots, **options)
    uses = (
        ("decode", 512, 1, 64, 0),
        ("decode split", 1, 1, 8192, 0),
        ("trees", 512, 8, 64, 9),
        ("prompt", 1, 64, 64, 0),
    )
    for use, num_seqs, query_len, kv_len, depth in uses:
        layout = meta_layout(num_seqs, query_len, kv_len, shape.block_size)
        if depth:
            layout.paths = empty(num_seqs * query_len, depth, dtype=torch.int32)
        query = empty(num_seqs * query_len, heads, rank + 64)
        for kind, cache in kinds if use.startswith("decode") else kinds[:1]:
            yield f"{use} {kind}", partial(latent_attention, query, cache, layout, **options)
