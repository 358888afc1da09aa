"""Latent attention: heads share one row of the cache per token, whose beginning is key and value alike.

A row has W = R + P numbers: the latent [R], then the rotated rest of the key [P]. A program attends with a tile of
BLOCK_Q neighbouring tokens of one sequence times BLOCK_H heads, so that a row that was loaded once serves as the key
and as the value of all of them (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1.2, projections absorbed). Keys are walked over
as in `attention_kernels.py`, whose `combine_splits` puts together what was attended to in pieces.

Shape legend: M rows of a tile = BLOCK_Q * BLOCK_H, N keys of a step, T tokens, Hq heads, K slots of a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire_kernels_cuda.triton.attention_kernels import LOG2E, places_on_paths, sequence_of, tree_of

__all__ = ["attend_latents", "attend_slots", "write_rows_kernel"]


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
def _attend_rows(
    q_latent, q_rest, top, total, acc, rows, inside, visible, score_scale,
    MASKED: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in base 2. rows: [N] pointers; inside: [N], visible: [M, N], used if MASKED."""
    latents = _load_part(rows, 0, inside, MASKED, R, R_PADDED)
    rest = _load_part(rows, R, inside, MASKED, P, P_PADDED)
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
    HAS_PATHS: tl.constexpr, ONE_TILE_EACH: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of the sequences that have min_query_len to max_query_len tokens in this step.

    Grid: (tiles, pieces of the heads, num_splits); tiles: sequences if ONE_TILE_EACH, else tokens // BLOCK_Q +
    sequences.

    Args:
        query: [T, Hq, R + P]. cache: [num_blocks, BLOCK_SIZE, R + P]. out: [T, Hq, R].
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
            q_latent, q_rest, top, total, acc, places, is_row, is_row, score_scale, False, R, R_PADDED, P, P_PADDED
        )
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
            q_latent, q_rest, top, total, acc, places, inside, visible, score_scale, True, R, R_PADDED, P, P_PADDED
        )
    _store_tile(
        acc, top, total, out, part_out, part_weight, query_row, seq.to(tl.int64) * BLOCK_Q + token, head, is_row, split,
        num_splits, num_heads, IS_SPLIT, R, R_PADDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots", "num_splits"])
def attend_slots(
    query, cache, slots, out, part_out, part_weight, num_slots, num_splits, num_heads, scale,
    stride_query_token, stride_query_head, stride_block, stride_token, stride_slots,
    R: tl.constexpr, R_PADDED: tl.constexpr, P: tl.constexpr, P_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
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
            q_latent, q_rest, top, total, acc, places, inside, visible, scale * LOG2E, True, R, R_PADDED, P, P_PADDED
        )
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
