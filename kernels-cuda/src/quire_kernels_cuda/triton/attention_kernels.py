"""Paged attention: one kernel for prompts and decodes, and one that puts together what was attended to in pieces.

A program attends with the queries of a tile: BLOCK_Q neighbouring tokens of one sequence, times the G query heads that
read the same key-value head, so that keys and values are loaded once for all of them. It walks over the keys in steps
of BLOCK_N with an online softmax (Milakov & Gimelshein 2018; Dao 2023, algorithm 1), in base 2. Where IS_SPLIT, a
sequence's keys are divided among num_splits programs (Dao et al. 2023, "Flash-Decoding"). Where JOINS, the one that
ends last puts their results together, else `combine_splits` does. Grids depend on counts that the host knows; lengths
are read from device memory, so that a captured graph serves sequences as they grow.

Shape legend: M rows of a tile = BLOCK_Q * G, padded to a power of two; N keys of a step; D head dimension, padded to a
power of two. The cache's formats are those of `quire_ops.kv_cache_ops`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2E", "attend_tiles", "combine_splits", "places_on_paths", "sequence_of", "tree_of"]

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1 << 30)
"""Position of what a token does not see."""
MAX_JOINED = tl.constexpr(8192)
"""Numbers of the results of splits that a program reads at once."""


@triton.jit
def _fp8_from_bits(bits, E4M3: tl.constexpr):
    """8-bit floats from their bits, as float16, exactly: for GPUs that cannot convert them.

    The exponent of e5m2 is float16's; that of e4m3 is 8 smaller, and its one NaN has no place among float16's.
    """
    wide = bits.to(tl.uint16)
    if E4M3:
        magnitude = (wide & 0x7F) << 7
        magnitude = tl.where(magnitude == 0x3F80, 0x7E00, magnitude).to(tl.uint16)
        number = (magnitude | ((wide & 0x80) << 8)).to(tl.uint16).to(tl.float16, bitcast=True)
        result = number * 256.0
    else:
        result = (wide << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    return result.to(tl.float16)


@triton.jit
def _load_rows(
    cache, rows, inside, MASKED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, FORMAT: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """[N, D_PADDED] of `dtype`: keys or values, without the scales that some formats have.

    rows: [N] int64, where each row begins. inside: [N], which are to be read, if MASKED.
    """
    # Of int4 each byte is loaded for both halves of the row. To load it once and join the halves gives other numbers on
    # sm_90 (Triton 3.6: join, permute and reshape of narrow rows), though not where kernels are interpreted.
    PARTS: tl.constexpr = 2 if FORMAT == "int4" else 1
    lanes = tl.arange(0, D_PADDED) % (D_PADDED // PARTS)
    at = cache + rows[:, None] + lanes[None, :]
    if MASKED:
        codes = tl.load(at, mask=inside[:, None] & (lanes < D // PARTS)[None, :], other=0.0)
    elif D != D_PADDED:
        codes = tl.load(at, mask=(lanes < D // PARTS)[None, :], other=0.0)
    else:
        codes = tl.load(at)
    if FORMAT == "int4":
        shift = tl.arange(0, D_PADDED) // (D_PADDED // 2) * 4
        numbers = (((codes.to(tl.int32) >> shift[None, :]) & 15) - 8).to(dtype)
    elif FORMAT == "e4m3 bits":
        numbers = _fp8_from_bits(codes, True).to(dtype)
    elif FORMAT == "e5m2 bits":
        numbers = _fp8_from_bits(codes, False).to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def sequence_of(tile, query_start_loc, num_seqs, BLOCK_Q: tl.constexpr):
    """Which sequence a tile belongs to, and which of its tiles it is.

    Tiles are numbered so that those of sequence s begin at query_start_loc[s] // BLOCK_Q + s: no number is given twice,
    some are not given at all. The sequence is the last one that begins at or before the tile.
    """
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(query_start_loc + middle) // BLOCK_Q + middle
        if begins <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - (tl.load(query_start_loc + low) // BLOCK_Q + low)


@triton.jit
def tree_of(paths, tokens, is_row, positions, first_token):
    """Of a tile whose sequence may be in a tree: where the tree begins (nowhere if there is none), the longest way to a
    token from there, and the tokens' positions.

    Args:
        paths: `PagedLayout.paths`, at the column of positions; tokens: [M] where the rows of its tokens begin.
        positions: [M] what they are if there is no tree.
        first_token: Where the row of the tile's first token begins.
    """
    is_tree = tl.load(paths + first_token) >= 0
    root = tl.where(is_tree, tl.load(paths + first_token + 1), NOWHERE)
    told = tl.load(paths + tokens, mask=is_row, other=0)
    positions = tl.where(is_tree & is_row, told, positions)
    depth = tl.where(is_tree, tl.max(tl.where(is_row, told, 0), 0) - root + 1, 0)
    return root, depth, positions


@triton.jit
def places_on_paths(keys, positions, paths, tokens, is_row, root, depth):
    """[M, N] positions of the keys (places in their sequence) as the tile's tokens see them, far behind all others for
    what is not on a token's path."""
    place = tl.where(keys < root, keys, NOWHERE)[None, :] + tl.zeros_like(positions)[:, None]
    for step in range(depth):
        on_path = is_row & (root + step <= positions)
        passed = tl.load(paths + tokens + 2 + step, mask=on_path, other=-1)
        place = tl.where(passed[:, None] == keys[None, :], root + step, place)
    return place


@triton.jit
def _walk(
    q, top, total, acc,  # [M, D], and of the softmax so far: [M] largest score, [M] sum, [M, D] weighted values
    begin, end, positions,  # keys to walk over, a multiple of BLOCK_N each but for the last end; [M] places of the rows
    cache, row_scales, table, stride_block, stride_value, stride_token,
    score_scale, soft_cap, window, slopes, paths, path_rows, is_row, root, depth,
    MASKED: tl.constexpr, FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_PATHS: tl.constexpr,
):  # fmt: skip
    """Attends to the keys from begin, a multiple of BLOCK_N, to end. MASKED: some rows may not see some of them."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        if BLOCK_N % BLOCK_SIZE == 0:  # places in blocks do not change from turn to turn
            nth_blocks = start // BLOCK_SIZE + tl.arange(0, BLOCK_N) // BLOCK_SIZE
            places = tl.arange(0, BLOCK_N) % BLOCK_SIZE
        else:
            nth_blocks, places = keys // BLOCK_SIZE, keys % BLOCK_SIZE
        if BLOCK_SIZE % BLOCK_N == 0:
            blocks = tl.load(table + start // BLOCK_SIZE) + tl.zeros([BLOCK_N], tl.int32)
        elif MASKED:
            blocks = tl.load(table + nth_blocks, mask=inside, other=0)
        else:
            blocks = tl.load(table + nth_blocks)
        rows = blocks.to(tl.int64) * stride_block + places * stride_token
        scales = rows
        if FORMAT == "int8" or FORMAT == "int4":
            # It must be told here, where the numbers are made, and not where they are an argument: otherwise the
            # compiler loads a byte at a time.
            rows = tl.multiple_of(rows, ALIGNMENT)
            scales = blocks.to(tl.int64) * (stride_block // 4) + places
        k = _load_rows(cache, rows, inside, MASKED, D, D_PADDED, FORMAT, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
        if FORMAT == "int8" or FORMAT == "int4":
            scores *= tl.load(row_scales + scales, mask=inside, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which neither overflows nor divides by zero.
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E) / soft_cap) + 1.0))
        if HAS_PATHS and MASKED:
            distance = positions[:, None] - places_on_paths(keys, positions, paths, path_rows, is_row, root, depth)
        else:
            distance = positions[:, None] - keys[None, :]
        if HAS_SLOPES:
            scores -= slopes[:, None] * distance
        if HAS_SOFT_CAP or HAS_SLOPES:  # otherwise it is part of the scale
            scores *= LOG2E
        if MASKED:
            visible = (distance >= 0) & inside[None, :]
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no finite score to subtract.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = _load_rows(cache + stride_value, rows, inside, MASKED, D, D_PADDED, FORMAT, q.dtype)
        if FORMAT == "int8" or FORMAT == "int4":
            value_scales = tl.load(row_scales + stride_value // 4 + scales, mask=inside, other=0.0)
            if q.dtype == tl.float16:  # in which weights times scales may be too small
                v = (v.to(tl.float32) * value_scales[:, None]).to(q.dtype)
            else:  # there are fewer weights than numbers
                weights *= value_scales[None, :]
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def _first_token(query_start_loc, num_seqs, ONE_TILE_EACH: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The sequence of the program's tile, and the first token of the tile there. The last tiles of a prompt see the
    most keys: they start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if ONE_TILE_EACH:
        seq = tile
        first = 0
    else:
        seq, nth = sequence_of(tile, query_start_loc, num_seqs, BLOCK_Q)
        first = nth * BLOCK_Q
    return seq, first


@triton.jit
def _cells(is_row, D: tl.constexpr, D_PADDED: tl.constexpr, FORMAT: tl.constexpr):
    """[D_PADDED] elements of a head that the lanes of a tile hold, and [M, D_PADDED] which are there at all."""
    lanes = tl.arange(0, D_PADDED)
    if FORMAT == "int4":  # the two halves of a row are padded each on its own
        element = lanes // (D_PADDED // 2) * (D // 2) + lanes % (D_PADDED // 2)
        is_cell = is_row[:, None] & (lanes % (D_PADDED // 2) < D // 2)[None, :]
    else:
        element = lanes
        is_cell = is_row[:, None] & (lanes < D)[None, :]
    return element, is_cell


@triton.jit
def _keys_of_split(begin, end, split, num_splits, BLOCK_N: tl.constexpr):
    """The keys from begin to end that one of `num_splits` programs attends to, in whole tiles; and how many programs,
    the first ones, have any, at least one."""
    split_keys = tl.maximum(tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits), 1) * BLOCK_N
    num_used = tl.maximum(tl.cdiv(end - begin, split_keys), 1)
    begin += split * split_keys
    return begin, tl.minimum(end, begin + split_keys), num_used


@triton.jit
def _is_last(arrived, num_programs):
    """Whether num_programs - 1 others came here before: then all that they wrote is seen by all threads of this one.

    The barrier orders a program's writes before its atomic addition, which one thread makes; that releases them, and
    acquires what those before have released; what it returns goes to the other threads behind another barrier. Triton
    compiles it so for NVIDIA's GPUs. On AMD's the barrier does not wait until other warps' writes are done.

    arrived: int32, zero before the first and after the last.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(arrived, 0)
    return is_last


@triton.jit
def _write_joined(
    out, part_out, part_weight, seq, query_begin, query_len, kv_head, num_splits, num_used, stride_out_token,
    stride_out_head, NUM_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The results of the first `num_used` splits, each as heavy as its weights, in their order whichever ended last."""
    PARTS: tl.constexpr = max(1, min(64, MAX_JOINED // (ROWS * D_PADDED)))
    rows = tl.arange(0, ROWS)
    is_row = (rows < BLOCK_Q * G) & (rows // G < query_len)
    head = kv_head * G + rows % G
    lanes = tl.arange(0, D_PADDED)
    first_part = ((seq.to(tl.int64) * BLOCK_Q + rows // G) * NUM_HEADS + head) * num_splits
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PADDED], tl.float32)
    for first in range(0, num_used, PARTS):
        split = first + tl.arange(0, PARTS)
        is_part = (split < num_used)[:, None] & is_row[None, :]
        part = first_part[None, :] + split[:, None]
        weight = tl.load(part_weight + part, mask=is_part, other=-float("inf"), cache_modifier=".cg")
        is_number = is_part[:, :, None] & (lanes < D)[None, None, :]
        at = part_out + part[:, :, None] * D + lanes[None, None, :]
        values = tl.load(at, mask=is_number, other=0.0, cache_modifier=".cg")  # others wrote it
        higher = tl.maximum(top, tl.max(weight, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(weight - base[None, :])
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 0)
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    begins = (query_begin + rows // G).to(tl.int64) * stride_out_token + head * stride_out_head
    at = out + begins[:, None] + lanes[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (lanes < D)[None, :])


@triton.jit
def _softmax_start(sinks, is_row, split, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[M] largest score and [M] sum of weights before any key: the head's sink, in the first split, or nothing."""
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        if split == 0:
            top = tl.load(sinks, mask=is_row, other=0.0) * LOG2E
            total += 1.0
    return top, total


@triton.jit
def _write_tile(
    top, total, acc, value_scale, out, part_out, part_weight, arrived, seq, token, head, kv_head, element, is_row,
    is_cell, query_row, query_begin, query_len, split, num_splits, num_used, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, HAS_KV_SCALE: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK_Q: tl.constexpr, JOINS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The result of the tile, or of a split what it gives and, if JOINS, by the last of them, the result of all."""
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_KV_SCALE:
        acc *= tl.load(value_scale)
    if num_used == 1:
        out_at = query_row[:, None] * stride_out_token + (head * stride_out_head)[:, None] + element[None, :]
        tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=is_cell)
    if IS_SPLIT:
        if num_used > 1:
            part = ((seq.to(tl.int64) * BLOCK_Q + token) * NUM_HEADS + head) * num_splits + split
            tl.store(part_out + part[:, None] * D + element[None, :], acc, mask=is_cell)
            tl.store(part_weight + part, top + tl.log2(total), mask=is_row)
            if JOINS:
                if _is_last(arrived + seq * (NUM_HEADS // G) + kv_head, num_used):
                    _write_joined(
                        out, part_out, part_weight, seq, query_begin, query_len, kv_head, num_splits, num_used,
                        stride_out_token, stride_out_head, NUM_HEADS, G, D, D_PADDED, BLOCK_Q, ROWS,
                    )  # fmt: skip


@triton.jit
def _score_scale(scale, kv_scale, kv_head, HAS_KV_SCALE: tl.constexpr, IN_BASE_2: tl.constexpr):
    """What products of queries and keys are multiplied by."""
    if HAS_KV_SCALE:
        scale *= tl.load(kv_scale + kv_head)
    if IN_BASE_2:
        scale *= LOG2E
    return scale


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "min_query_len", "max_query_len", "window", "stride_table",
                            "stride_paths"])  # fmt: skip
def attend_tiles(
    query, cache, row_scales, kv_scale, block_table, query_start_loc, seq_lens, sinks, alibi_slopes, paths,
    out, part_out, part_weight, arrived,
    num_seqs, num_splits, min_query_len, max_query_len, scale, soft_cap, window,
    stride_query_token, stride_query_head, stride_out_token, stride_out_head,
    stride_block, stride_value, stride_head, stride_token, stride_table, stride_paths,
    NUM_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr, HAS_KV_SCALE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, ONE_TILE_EACH: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_PATHS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, JOINS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention of the sequences that have min_query_len to max_query_len tokens in this step.

    Grid: (tiles, key-value heads, num_splits); tiles: sequences if ONE_TILE_EACH, else tokens // BLOCK_Q + sequences.

    Args:
        query: [T, Hq, D]; out: likewise.
        cache: [num_blocks, 2, Hkv, BLOCK_SIZE, X], where rows with scales begin at multiples of ALIGNMENT bytes.
            row_scales: its memory as float32, where rows have scales. kv_scale: [2, Hkv] float32.
        block_table: [S, B] int32. query_start_loc: [S + 1] int32. seq_lens: [S] int32.
        sinks, alibi_slopes: [Hq] float32. paths: [T, P] int32, of `PagedLayout`, if HAS_PATHS.
        part_out: [S * BLOCK_Q, Hq, num_splits, D] float32, the result of each split; tokens of a sequence from BLOCK_Q
            times its number on. part_weight: [S * BLOCK_Q, Hq, num_splits] float32, the base-2 logarithm of the sum of
            its weights. Written instead of `out` where IS_SPLIT, which only launches of ONE_TILE_EACH are.
        arrived: [S, Hkv] int32, zeros, which are left as zeros: how many splits have ended, if JOINS. Then the last one
            writes `out`, and splits without keys write nothing. ROWS: BLOCK_Q * G to a power of two.
    """
    seq, first = _first_token(query_start_loc, num_seqs, ONE_TILE_EACH, BLOCK_Q)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    query_begin = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_begin
    if (first >= query_len) | (query_len < min_query_len) | (query_len > max_query_len):
        return
    seq_len = tl.load(seq_lens + seq)

    rows = tl.arange(0, BLOCK_M)
    token = first + rows // G
    head = kv_head * G + rows % G
    is_row = (rows < BLOCK_Q * G) & (token < query_len)
    element, is_cell = _cells(is_row, D, D_PADDED, FORMAT)
    query_row = (query_begin + token).to(tl.int64)
    q_at = query_row[:, None] * stride_query_token + (head * stride_query_head)[:, None] + element[None, :]
    q = tl.load(query + q_at, mask=is_cell, other=0.0)

    first_position = seq_len - query_len + first
    positions = first_position + rows // G
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    begin = 0
    # What every row sees: all keys but those of the tile's own tokens, where there is no window.
    seen_by_all, earliest = first_position + 1, first_position
    path_rows, root, depth = query_row, seq_len, 0
    if HAS_PATHS:
        path_rows = query_row * stride_paths
        first_row = (query_begin + first).to(tl.int64) * stride_paths
        root, depth, positions = tree_of(paths, path_rows, is_row, positions, first_row)
        seen_by_all = tl.minimum(seen_by_all, root)
        earliest = tl.min(tl.where(is_row, positions, first_position), 0)
    if HAS_WINDOW:
        begin = tl.maximum(earliest - window + 1, 0) // BLOCK_N * BLOCK_N
    num_used = 1
    if IS_SPLIT:
        begin, end, num_used = _keys_of_split(begin, end, split, num_splits, BLOCK_N)
        if not JOINS:  # all are read
            num_used = num_splits
        if split >= num_used:
            return

    top, total = _softmax_start(sinks + head, is_row, split, HAS_SINKS, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
    slopes = top
    if HAS_SLOPES:
        slopes = tl.load(alibi_slopes + head, mask=is_row, other=0.0)
    score_scale = _score_scale(scale, kv_scale, kv_head, HAS_KV_SCALE, not HAS_SOFT_CAP and not HAS_SLOPES)
    cache += kv_head * stride_head
    row_scales += (kv_head * stride_head + BLOCK_SIZE * stride_token) // 4
    table = block_table + seq.to(tl.int64) * stride_table

    plain_end = begin
    if not HAS_WINDOW:  # without masks
        plain_end = begin + tl.maximum(tl.minimum(end, seen_by_all) - begin, 0) // BLOCK_N * BLOCK_N
        top, total, acc = _walk(
            q, top, total, acc, begin, plain_end, positions, cache, row_scales, table, stride_block, stride_value,
            stride_token, score_scale, soft_cap, window, slopes, paths, path_rows, is_row, root, depth,
            False, FORMAT, ALIGNMENT, D, D_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SLOPES, HAS_PATHS,
        )  # fmt: skip
    top, total, acc = _walk(
        q, top, total, acc, plain_end, end, positions, cache, row_scales, table, stride_block, stride_value,
        stride_token, score_scale, soft_cap, window, slopes, paths, path_rows, is_row, root, depth,
        True, FORMAT, ALIGNMENT, D, D_PADDED, BLOCK_N, BLOCK_SIZE, HAS_WINDOW, HAS_SOFT_CAP, HAS_SLOPES, HAS_PATHS,
    )  # fmt: skip

    if HAS_KV_SCALE:
        kv_scale += NUM_HEADS // G + kv_head
    _write_tile(
        top, total, acc, kv_scale, out, part_out, part_weight, arrived, seq, token, head, kv_head, element, is_row,
        is_cell, query_row, query_begin, query_len, split, num_splits, num_used, stride_out_token, stride_out_head,
        NUM_HEADS, G, D, D_PADDED, HAS_KV_SCALE, IS_SPLIT, BLOCK_Q, JOINS, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_query_len", "num_splits", "num_heads"])
def combine_splits(
    part_out, part_weight, query_start_loc, out, max_query_len, num_splits, num_heads, stride_out_token,
    stride_out_head, D: tl.constexpr, D_PADDED: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """The results of the splits, each as heavy as its weights. Grid: (sequences, heads, tokens of a tile).

    Serves the sequences of at most max_query_len tokens.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    nth = tl.program_id(2)
    query_begin = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_begin
    if (nth >= query_len) | (query_len > max_query_len):
        return
    token = (query_begin + nth).to(tl.int64)
    part_row = seq * tl.num_programs(2) + nth
    splits = tl.arange(0, MAX_SPLITS)
    is_split = splits < num_splits
    lanes = tl.arange(0, D_PADDED)
    part = (part_row * num_heads + head) * num_splits + splits
    weight = tl.load(part_weight + part, mask=is_split, other=-float("inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    parts = tl.load(
        part_out + part[:, None] * D + lanes[None, :], mask=is_split[:, None] & (lanes < D)[None, :], other=0.0
    )
    attended = tl.sum(parts * weight[:, None], 0)
    at = token * stride_out_token + head * stride_out_head + lanes
    tl.store(out + at, attended.to(out.dtype.element_ty), mask=lanes < D)
