"""Latent attention: heads share one row of the cache per token, whose beginning is key and value alike.

A row has W = R + P numbers: the latent [R], then the rotated rest of the key [P]; if FP8, as bytes of the layout in
`quire_ops.latent_format`, whose latents are widened to the queries' dtype as they are loaded. A program attends with a
tile of BLOCK_Q neighbouring tokens of one sequence times BLOCK_H heads, so that a row that was loaded once serves as
the key and as the value of all of them (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1.2, projections absorbed). Keys are
walked over as in `attention_kernels.py`, whose `combine_splits` puts together what was attended to in pieces.

Shape legend: M rows of a tile = BLOCK_Q * BLOCK_H, N keys of a step, T tokens, Hq heads, K slots of a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_kernels_cuda.triton.attention_kernels import LOG2E, places_on_paths, sequence_of, tree_of
from quire_kernels_cuda.triton.rotary import fp8_bits

__all__ = ["attend_latents", "attend_slots", "write_fp8_rows_kernel", "write_rows_kernel"]

GROUP = tl.constexpr(128)
"""Numbers of a latent that share a scale."""


@triton.jit
def _load_part(rows, first, inside, MASKED: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[N, PADDED]: numbers `first` and following of rows at [N] pointers."""
    lanes = tl.arange(0, PADDED)
    at = rows[:, None] + first + lanes[None, :]
    if MASKED:
        part = tl.load(at, mask=inside[:, None] & (lanes < SIZE)[None, :], other=0.0)
    elif SIZE != PADDED:
        part = tl.load(at, mask=(lanes < SIZE)[None, :], other=0.0)
    else:
        part = tl.load(at)
    return part


@triton.jit
def _load_latents(
    rows, inside, MASKED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr
):
    """[N, R_PADDED] of `dtype`: the latents of rows at [N] pointers."""
    latents = _load_part(rows, 0, inside, MASKED, R, R_PADDED)
    if FP8:
        scales = (rows + R).to(tl.pointer_type(tl.float32))
        group = tl.arange(0, R_PADDED) // GROUP
        factors = tl.zeros([rows.shape[0], R_PADDED], tl.float32)
        for each in tl.static_range((R + GROUP - 1) // GROUP):
            if MASKED:
                scale = tl.load(scales + each, mask=inside, other=0.0)
            else:
                scale = tl.load(scales + each)
            factors = tl.where((group == each)[None, :], scale[:, None], factors)
        # With e4m3's exponent in the place of float16's bits are of numbers 256 times smaller. What is no number has a
        # scale that is none.
        wide = latents.to(tl.uint16)
        numbers = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.uint16).to(tl.float16, bitcast=True)
        latents = (numbers.to(tl.float32) * (factors * 256.0)).to(dtype)
    return latents


@triton.jit
def _load_rest(
    rows, inside, MASKED: tl.constexpr, R: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr, FP8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """[N, P_PADDED] of `dtype`: what rows at [N] pointers have behind their latents."""
    if FP8:
        behind = (rows + R + 4 * ((R + GROUP - 1) // GROUP)).to(tl.pointer_type(tl.bfloat16))
        rest = _load_part(behind, 0, inside, MASKED, P, P_PADDED).to(dtype)
    else:
        rest = _load_part(rows, R, inside, MASKED, P, P_PADDED)
    return rest


@triton.jit
def _attend_rows(
    q_latent, q_rest, top, total, acc, rows, inside, visible, score_scale,
    MASKED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in base 2. rows: [N] pointers; inside: [N], visible: [M, N], used if MASKED."""
    latents = _load_latents(rows, inside, MASKED, R, R_PADDED, FP8, q_latent.dtype)
    rest = _load_rest(rows, inside, MASKED, R, P, P_PADDED, FP8, q_latent.dtype)
    scores = tl.dot(q_rest, tl.trans(rest), input_precision="ieee")
    scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee") * score_scale
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has no finite score to subtract.
    base = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _store_tile(
    acc, top, total, out, part_out, part_weight, query_row, part_row, head, is_row, split, num_splits, num_heads,
    IS_SPLIT: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, R_PADDED)
    is_cell = is_row[:, None] & (lanes < R)[None, :]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if IS_SPLIT:
        place = (part_row * num_heads + head) * num_splits + split
        tl.store(part_out + place[:, None] * R + lanes[None, :], acc, mask=is_cell)
        tl.store(part_weight + place, top + tl.log2(total), mask=is_row)
    else:
        place = query_row * num_heads + head
        tl.store(out + place[:, None] * R + lanes[None, :], acc.to(out.dtype.element_ty), mask=is_cell)


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "min_query_len", "max_query_len", "stride_table",
                               "stride_paths"])  # fmt: skip
def attend_latents(
    query, cache, block_table, query_start_loc, seq_lens, paths, out, part_out, part_weight,
    num_seqs, num_splits, min_query_len, max_query_len, num_heads, scale,
    stride_query_token, stride_query_head, stride_block, stride_token, stride_table, stride_paths,
    R: tl.constexpr, R_PADDED: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, HAS_PATHS: tl.constexpr, ONE_TILE_EACH: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of the sequences that have min_query_len to max_query_len tokens in this step.

    Grid: (tiles, pieces of the heads, num_splits); tiles: sequences if ONE_TILE_EACH, else tokens // BLOCK_Q +
    sequences.

    Args:
        query: [T, Hq, R + P]. cache: [num_blocks, BLOCK_SIZE, R + P], or bytes if FP8. out: [T, Hq, R].
        block_table: [S, B] int32. query_start_loc: [S + 1] int32. seq_lens: [S] int32.
        paths: [T, width] int32, of `PagedLayout`, if HAS_PATHS.
        part_out: [S * BLOCK_Q, Hq, num_splits, R] float32. part_weight: [S * BLOCK_Q, Hq, num_splits] float32. Both in
            the place of `out` if IS_SPLIT.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt see the most keys
    split = tl.program_id(2)
    if ONE_TILE_EACH:
        seq = tile
        first = 0
    else:
        seq, nth = sequence_of(tile, query_start_loc, num_seqs, BLOCK_Q)
        first = nth * BLOCK_Q
    query_begin = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_begin
    if (first >= query_len) | (query_len < min_query_len) | (query_len > max_query_len):
        return
    seq_len = tl.load(seq_lens + seq)

    rows = tl.arange(0, BLOCK_Q * BLOCK_H)
    token = first + rows // BLOCK_H
    head = tl.program_id(1) * BLOCK_H + rows % BLOCK_H
    is_row = (token < query_len) & (head < num_heads)
    query_row = (query_begin + token).to(tl.int64)
    q_rows = query + query_row * stride_query_token + head * stride_query_head
    q_latent = _load_part(q_rows, 0, is_row, True, R, R_PADDED)
    q_rest = _load_part(q_rows, R, is_row, True, P, P_PADDED)

    first_position = seq_len - query_len + first
    positions = first_position + rows // BLOCK_H
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    seen_by_all = first_position + 1
    path_rows, root, depth = query_row, seq_len, 0
    if HAS_PATHS:
        path_rows = query_row * stride_paths
        first_row = (query_begin + first).to(tl.int64) * stride_paths
        root, depth, positions = tree_of(paths, path_rows, is_row, positions, first_row)
        seen_by_all = tl.minimum(seen_by_all, root)
    begin = 0
    if IS_SPLIT:
        steps = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits)
        begin = split * steps * BLOCK_N
        end = tl.minimum(end, begin + steps * BLOCK_N)

    top = tl.full([BLOCK_Q * BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_Q * BLOCK_H, R_PADDED], tl.float32)
    score_scale = scale * LOG2E
    table = block_table + seq.to(tl.int64) * stride_table
    plain_end = begin + tl.maximum(tl.minimum(end, seen_by_all) - begin, 0) // BLOCK_N * BLOCK_N
    for start in range(begin, plain_end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        places = cache + blocks * stride_block + (keys % BLOCK_SIZE) * stride_token
        top, total, acc = _attend_rows(
            q_latent, q_rest, top, total, acc, places, is_row, is_row, score_scale, False, R, R_PADDED, P, P_PADDED,
            FP8,
        )  # fmt: skip
    for start in range(plain_end, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        places = cache + blocks * stride_block + (keys % BLOCK_SIZE) * stride_token
        seen_at = keys[None, :]
        if HAS_PATHS:
            seen_at = places_on_paths(keys, positions, paths, path_rows, is_row, root, depth)
        visible = (positions[:, None] >= seen_at) & inside[None, :]
        top, total, acc = _attend_rows(
            q_latent, q_rest, top, total, acc, places, inside, visible, score_scale, True, R, R_PADDED, P, P_PADDED,
            FP8,
        )  # fmt: skip
    _store_tile(
        acc, top, total, out, part_out, part_weight, query_row, seq.to(tl.int64) * BLOCK_Q + token, head, is_row, split,
        num_splits, num_heads, IS_SPLIT, R, R_PADDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots", "num_splits"])
def attend_slots(
    query, cache, slots, out, part_out, part_weight, num_slots, num_splits, num_heads, scale,
    stride_query_token, stride_query_head, stride_block, stride_token, stride_slots,
    R: tl.constexpr, R_PADDED: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of each token over the rows in its own slots. Grid: (tokens, pieces of the heads, num_splits).

    Args:
        slots: [T, K] int64; nothing is read for those of -1. The others are as of `attend_latents`.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_row = head < num_heads
    q_rows = query + token * stride_query_token + head * stride_query_head
    q_latent = _load_part(q_rows, 0, is_row, True, R, R_PADDED)
    q_rest = _load_part(q_rows, R, is_row, True, P, P_PADDED)
    begin = 0
    end = num_slots
    if IS_SPLIT:
        steps = tl.cdiv(tl.cdiv(num_slots, BLOCK_N), num_splits)
        begin = split * steps * BLOCK_N
        end = tl.minimum(end, begin + steps * BLOCK_N)
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, R_PADDED], tl.float32)
    for start in range(begin, end, BLOCK_N):
        nth = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + token * stride_slots + nth, mask=nth < end, other=-1)
        inside = slot >= 0
        slot = tl.maximum(slot, 0)
        places = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
        visible = inside[None, :] & is_row[:, None]
        top, total, acc = _attend_rows(
            q_latent, q_rest, top, total, acc, places, inside, visible, scale * LOG2E, True, R, R_PADDED, P, P_PADDED,
            FP8,
        )  # fmt: skip
    _store_tile(
        acc, top, total, out, part_out, part_weight, token, token, head, is_row, split, num_splits, num_heads, IS_SPLIT,
        R, R_PADDED,
    )  # fmt: skip


@triton.jit
def write_rows_kernel(row, cache, slots, block_size, size, stride_row, stride_block, stride_token, BLOCK: tl.constexpr):
    """Row t [size] into slot `slots[t]` of the cache. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    numbers = tl.load(row + token * stride_row + lanes, mask=lanes < size, other=0.0)
    place = slot // block_size * stride_block + slot % block_size * stride_token
    tl.store(cache + place + lanes, numbers, mask=lanes < size)


@triton.jit
def write_fp8_rows_kernel(
    row, cache, slots, block_size, stride_row, stride_block, stride_token,
    R: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr,
):  # fmt: skip
    """Row t [R + P] into slot `slots[t]` of a cache of bytes: a scale for each group of the latent. Grid: (tokens,).

    The bits are those of every other backend: quotients are rounded in float32.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    to = cache + slot // block_size * stride_block + slot % block_size * stride_token
    scales = (to + R).to(tl.pointer_type(tl.float32))
    lanes = tl.arange(0, GROUP)
    for group in tl.static_range((R + GROUP - 1) // GROUP):
        inside = group * GROUP + lanes < R
        x = tl.load(row + token * stride_row + group * GROUP + lanes, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(x), axis=0)
        scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)), 1.1754943508222875e-38)
        scale = tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), scale)
        quotient = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale)
        clamped = tl.where(quotient == quotient, tl.minimum(tl.maximum(quotient, -448.0), 448.0), quotient)
        tl.store(to + group * GROUP + lanes, fp8_bits(clamped, 3, 7), mask=inside)
        tl.store(scales + group, scale)
    behind = (to + R + 4 * ((R + GROUP - 1) // GROUP)).to(tl.pointer_type(tl.bfloat16))
    rest = tl.arange(0, P_PADDED)
    x = tl.load(row + token * stride_row + R + rest, mask=rest < P, other=0.0)
    tl.store(behind + rest, x.to(tl.bfloat16), mask=rest < P)
