"""Which tokens sparse attention reads: scores of a token's past, the best of them, and where these stand in the cache.

A program scores some of the keys of one token's sequence, another one finds the best of a token's scores. Lengths and
block tables are read on the device, so that a captured graph stays right as sequences grow: its grid is made for the
longest sequence that there may be, programs behind a token's own past return at once, and no more scores are looked at
than it has.

Shape legend: T tokens of the step, S sequences, Hi heads of the index, D their dimension, K tokens that are found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.triton.attention_steps import MIN_TILE, lengths_of, meta_layout, padded
from quire_ops import CACHE_TORCH_DTYPES, PagedLayout, implements, ops

__all__ = [
    "calls",
    "index_best_kernel",
    "index_scores_kernel",
    "index_topk",
    "position_slots",
    "position_slots_kernel",
]

WORKSPACE = 1 << 24
"""Scores that are held at once."""
_MOST_HEADS = 64
_KEYS = 64
_SCORES = 1024
"""Scores that a program of `index_best_kernel` looks at together."""


@triton.jit
def _sequence_of(token, query_start_loc, num_seqs):
    """The sequence that a token of the step is in: the last one that begins at it or before."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start_loc + middle)
        low = tl.where(begins <= token, middle, low)
        high = tl.where(begins <= token, high, middle)
    return low


@triton.jit(do_not_specialize=["first", "num_seqs", "longest"])
def index_scores_kernel(
    query, weights, keys, block_table, query_start_loc, seq_lens, scores,
    first, num_seqs, num_heads, longest, block_size, query_token, query_head, key_block, key_row, table_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scores [T, longest] float32 of tokens from `first` on: those of keys up to the token itself. What is behind it is
    -inf, or not written at all.

    Grid: (T, pieces of BLOCK_N keys).
    """
    token = first + tl.program_id(0)
    seq = _sequence_of(token, query_start_loc, num_seqs)
    position = tl.load(seq_lens + seq) - (tl.load(query_start_loc + seq + 1) - token)
    if tl.program_id(1) * BLOCK_N > position:
        return
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = col <= position
    block = tl.load(block_table + seq.to(tl.int64) * table_row + col // block_size, mask=seen, other=0).to(tl.int64)
    lane = tl.arange(0, BLOCK_D)
    place = block * key_block + (col % block_size) * key_row
    key = tl.load(keys + place[:, None] + lane[None, :], mask=seen[:, None] & (lane < D)[None, :], other=0.0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for begin in range(0, num_heads, BLOCK_H):
        head = begin + tl.arange(0, BLOCK_H)
        q_place = token.to(tl.int64) * query_token + head[:, None] * query_head + lane[None, :]
        q = tl.load(query + q_place, mask=(head < num_heads)[:, None] & (lane < D)[None, :], other=0.0)
        weight = tl.load(weights + token.to(tl.int64) * num_heads + head, mask=head < num_heads, other=0.0)
        product = tl.dot(q, tl.trans(key), input_precision="ieee")
        total += tl.sum(tl.maximum(product, 0.0) * weight[:, None], axis=0)
    out = tl.program_id(0).to(tl.int64) * longest + col
    tl.store(scores + out, tl.where(seen, total, float("-inf")), mask=col < longest)


@triton.jit
def _in_order(scores, inside):
    """uint32 in the order of float32 scores; -0.0 is 0.0, and what is not `inside` is 0."""
    score = tl.load(scores, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(inside, tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF), 0).to(tl.uint32)


@triton.jit(do_not_specialize=["first", "num_seqs", "longest", "count"])
def index_best_kernel(
    scores, query_start_loc, seq_lens, best, first, num_seqs, longest, count, BLOCK: tl.constexpr
):  # fmt: skip
    """best [T, count] int64: columns of the largest of a token's scores [T, longest], in rising order; where it has
    fewer, all of them, and -1 behind. Grid: (T,).

    The smallest that is among them is found digit by digit, from histograms of eight bits (radix select).
    """
    token = first + tl.program_id(0)
    seq = _sequence_of(token, query_start_loc, num_seqs)
    num_scores = tl.load(seq_lens + seq) - (tl.load(query_start_loc + seq + 1) - token) + 1
    scores += tl.program_id(0).to(tl.int64) * longest
    best += token.to(tl.int64) * count
    if num_scores <= count:
        for begin in range(0, count, BLOCK):
            col = begin + tl.arange(0, BLOCK)
            tl.store(best + col, tl.where(col < num_scores, col, -1).to(tl.int64), mask=col < count)
    else:
        digits = tl.arange(0, 256)
        smallest = tl.zeros([1], tl.uint32)
        wanted = tl.zeros([1], tl.int32) + count
        for nth in tl.static_range(4):
            shift = 24 - 8 * nth
            counts = tl.zeros([256], tl.int32)
            for begin in range(0, num_scores, BLOCK):
                col = begin + tl.arange(0, BLOCK)
                inside = col < num_scores
                place = _in_order(scores + col, inside)
                if nth > 0:
                    inside = inside & (place >> (shift + 8) == smallest >> (shift + 8))
                # Of what does not count the digit is 0, and is taken away again.
                digit = tl.where(inside, (place >> shift) & 255, 0).to(tl.int32)
                left_out = tl.sum((~inside).to(tl.int32), 0)
                counts += tl.histogram(digit, 256) - tl.where(digits == 0, left_out, 0)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            is_digit = (above < wanted) & (above + counts >= wanted)
            wanted -= tl.sum(tl.where(is_digit, above, 0), 0)
            smallest += tl.sum(tl.where(is_digit, digits, 0), 0).to(tl.uint32) << shift
        num_found = tl.zeros([1], tl.int32)
        num_equal = tl.zeros([1], tl.int32)
        for begin in range(0, num_scores, BLOCK):
            col = begin + tl.arange(0, BLOCK)
            inside = col < num_scores
            place = _in_order(scores + col, inside)
            equal = (inside & (place == smallest)).to(tl.int32)
            among = num_equal + tl.cumsum(equal, 0) <= wanted
            found = ((inside & (place > smallest)) | ((equal > 0) & among)).to(tl.int32)
            tl.store(best + num_found + tl.cumsum(found, 0) - 1, col.to(tl.int64), mask=found > 0)
            num_found += tl.sum(found, 0)
            num_equal += tl.sum(equal, 0)


@triton.jit(do_not_specialize=["num_seqs", "count"])
def position_slots_kernel(
    positions, block_table, query_start_loc, slots, num_seqs, count, block_size, table_row, BLOCK: tl.constexpr
):  # fmt: skip
    """slots [T, count] of positions [T, count] in the token's sequence; -1 for -1. Grid: (T, pieces of BLOCK)."""
    token = tl.program_id(0)
    seq = _sequence_of(token, query_start_loc, num_seqs)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = token.to(tl.int64) * count + col
    position = tl.load(positions + place, mask=col < count, other=-1)
    found = position >= 0
    block = tl.load(block_table + seq.to(tl.int64) * table_row + position // block_size, mask=found, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(slots + place, tl.where(found, slot, -1), mask=col < count)


@implements(ops.index_topk)
def index_topk(query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout, *, k: int) -> Tensor:
    """Op `index_topk`. Positions rise."""
    num_tokens, num_heads, size = query.shape
    longest = lengths_of(layout).longest
    k = min(k, longest)
    out = torch.empty((num_tokens, k), dtype=torch.int64, device=query.device)
    query = query if query.stride(-1) == 1 else query.contiguous()
    weights = weights.float().contiguous()
    rows = max(1, WORKSPACE // longest)
    block_h = min(_MOST_HEADS, max(MIN_TILE, triton.next_power_of_2(num_heads)))
    for first in range(0, num_tokens, rows):
        part = slice(first, min(first + rows, num_tokens))
        scores = torch.empty((part.stop - first, longest), dtype=torch.float32, device=query.device)
        index_scores_kernel[(part.stop - first, triton.cdiv(longest, _KEYS))](
            query, weights, key_cache, layout.block_table, layout.query_start_loc, layout.seq_lens, scores,
            first, len(layout.query_lens), num_heads, longest, layout.block_size, query.stride(0), query.stride(1),
            key_cache.stride(0), key_cache.stride(1), layout.block_table.stride(0),
            D=size, BLOCK_D=padded(size), BLOCK_H=block_h, BLOCK_N=_KEYS, num_warps=4, num_stages=1,
        )  # fmt: skip
        index_best_kernel[(part.stop - first,)](
            scores, layout.query_start_loc, layout.seq_lens, out, first, len(layout.query_lens), longest, k,
            BLOCK=_SCORES, num_warps=4,
        )  # fmt: skip
    return out


@implements(ops.position_slots)
def position_slots(positions: Tensor, layout: PagedLayout) -> Tensor:
    positions = positions.contiguous()
    slots = torch.empty_like(positions)
    num_tokens, count = positions.shape
    if slots.numel():
        position_slots_kernel[(num_tokens, triton.cdiv(count, 1024))](
            positions, layout.block_table, layout.query_start_loc, slots, len(layout.query_lens), count,
            layout.block_size, layout.block_table.stride(0), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return slots


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """An index of 64 heads of 128 (DeepSeek-V3.2), and where the tokens are that it finds."""
    if not shape.latent_rank:
        return
    dtype, width = CACHE_TORCH_DTYPES[shape.dtype], shape.latent_rank + 64

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    layout = meta_layout(16, 1, 8192, shape.block_size)
    keys = empty(shape.num_blocks, shape.block_size, width + 128)[..., width:]
    weights = empty(16, 64, dtype=torch.float32)
    yield f"{shape.dtype}{shape.cache_label}", lambda: index_topk(empty(16, 64, 128), weights, keys, layout, k=2048)
    yield shape.dtype, lambda: position_slots(empty(16, 2048, dtype=torch.int64), layout)
