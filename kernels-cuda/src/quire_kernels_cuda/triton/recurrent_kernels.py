"""Recurrent layers token by token, the state in registers: for decodes, drafts and short prompts.

A program follows one sequence through the step with a piece of its state. `quire_ops.recurrent` says where states are
read and stored: that is worked out here from block tables and lengths in device memory, so that a captured graph serves
sequences as they grow. Everything is computed in float32.

Shape legend: C channels, K taps, H heads, P channels of a head, N numbers of state per channel, Dk and Dv sizes of keys
and values. BC, BP, BV: the piece of a program. Other dimensions are padded to powers of two, TAPS, NS, DK.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["causal_conv1d_kernel", "gated_delta_rule_kernel", "mamba2_kernel", "selective_scan_kernel", "wkv_kernel"]


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _span(query_start_loc, seq_lens, block_table, seq, table_width, block_size):
    """Of a sequence: its first token in the step, its first position, its end, and the block to go on from (or 0)."""
    token = tl.load(query_start_loc + seq)
    end = tl.load(seq_lens + seq)
    start = end - (tl.load(query_start_loc + seq + 1) - token)
    place = tl.maximum(start - 1, 0) // block_size
    block = tl.load(block_table + seq * table_width + place)
    return token.to(tl.int64), start, end, tl.where(start > 0, block, 0).to(tl.int64)


@triton.jit
def _state_before(places, block, mask):
    """What is kept in a block, all of it read before anything is written: the block may be stored to again."""
    state = tl.load(places, mask=mask, other=0.0)
    tl.debug_barrier()
    return tl.where(block > 0, state, 0.0)


@triton.jit
def _block_to_store(block_table, seq, table_width, position, end, block_size):
    """The block that gets the state after the token at `position`, or -1 for none."""
    block = tl.load(block_table + seq * table_width + position // block_size).to(tl.int64)
    is_last = position == end - 1
    ends_block = ((position + 1) % block_size == 0) & (block > 0)
    return tl.where(is_last | ends_block, block, -1)


@triton.jit
def causal_conv1d_kernel(
    x, weight, bias, state, out, block_table, query_start_loc, seq_lens, table_width, block_size, state_block,
    channels, x_row,
    K: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The last K inputs of each channel are kept as a window [TAPS, BC], the newest at place K - 1."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    tap = tl.arange(0, TAPS)
    inside = channel < channels
    token, start, end, read = _span(query_start_loc, seq_lens, block_table, seq, table_width, block_size)
    # A window slides by one place per token: place k of the next one is place k + 1 of this one.
    place = tap[:, None] * channels + channel[None, :]
    past = (tap < K - 1)[:, None] & inside[None, :]
    window = _state_before(state + read * state_block + place, read, past)
    taps = tl.load(weight + channel[None, :] * K + tap[:, None], mask=(tap < K)[:, None] & inside[None, :], other=0.0)
    taps = taps.to(tl.float32)
    offset = tl.zeros([BC], dtype=tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    is_newest = (tap == K - 1)[:, None]
    for position in range(start, end):
        row = token + position - start
        newest = tl.load(x + row * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        window = tl.where(is_newest, newest[None, :], window)
        result = tl.sum(window * taps, axis=0) + offset
        if SILU:
            result = result * tl.sigmoid(result)
        tl.store(out + row * channels + channel, result.to(out.dtype.element_ty), mask=inside)
        block = _block_to_store(block_table, seq, table_width, position, end, block_size)
        if block >= 0:
            # Inputs 1 to K - 1 of the window are the last K - 1 ones.
            target = state + block * state_block + place - channels
            tl.store(target, window, mask=((tap > 0) & (tap < K))[:, None] & inside[None, :])
        moved = tl.zeros([TAPS, BC], dtype=tl.float32)
        for k in tl.static_range(K - 1):
            older = tl.sum(tl.where((tap == k + 1)[:, None], window, 0.0), axis=0)
            moved = tl.where((tap == k)[:, None], older[None, :], moved)
        window = moved


@triton.jit
def mamba2_kernel(
    x, dt, a, b, c, d, dt_bias, state, out, block_table, query_start_loc, seq_lens, table_width, block_size,
    state_block, num_heads, heads_per_group, x_row, dt_row, b_row, c_row, dt_low, dt_high,
    P: tl.constexpr, N: tl.constexpr, NS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """h = exp(s * a) * h + s * x b^T; out = h c + d * x, with h [BP, NS]."""
    seq, head = tl.program_id(0), tl.program_id(1)
    channel, number = tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, NS)
    token, start, end, read = _span(query_start_loc, seq_lens, block_table, seq, table_width, block_size)
    inside = (channel < P)[:, None] & (number < N)[None, :]
    place = (head * P + channel)[:, None] * N + number[None, :]
    now = _state_before(state + read * state_block + place, read, inside)
    decay, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    projected = (head // heads_per_group) * N + number
    for position in range(start, end):
        row = token + position - start
        step = _softplus(tl.load(dt + row * dt_row + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, dt_low), dt_high)
        value = tl.load(x + row * x_row + head * P + channel, mask=channel < P, other=0.0).to(tl.float32)
        to_state = tl.load(b + row * b_row + projected, mask=number < N, other=0.0).to(tl.float32)
        from_state = tl.load(c + row * c_row + projected, mask=number < N, other=0.0).to(tl.float32)
        now = tl.exp(step * decay) * now + (step * value)[:, None] * to_state[None, :]
        result = tl.sum(now * from_state[None, :], axis=1) + skip * value
        tl.store(out + (row * num_heads + head) * P + channel, result.to(out.dtype.element_ty), mask=channel < P)
        block = _block_to_store(block_table, seq, table_width, position, end, block_size)
        if block >= 0:
            tl.store(state + block * state_block + place, now, mask=inside)


@triton.jit
def selective_scan_kernel(
    x, dt, a, b, c, d, dt_bias, state, out, block_table, query_start_loc, seq_lens, table_width, block_size,
    state_block, channels, x_row, dt_row, b_row, c_row,
    N: tl.constexpr, NS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """h = exp(s * a) * h + s * x b^T; out = h c + d * x, with h [BC, NS] and a decay for each of its numbers."""
    seq = tl.program_id(0)
    channel, number = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, NS)
    inside_c, inside_n = channel < channels, number < N
    token, start, end, read = _span(query_start_loc, seq_lens, block_table, seq, table_width, block_size)
    inside = inside_c[:, None] & inside_n[None, :]
    place = channel[:, None] * N + number[None, :]
    now = _state_before(state + read * state_block + place, read, inside)
    decay = tl.load(a + place, mask=inside, other=0.0)
    skip = tl.load(d + channel, mask=inside_c, other=0.0)
    bias = tl.load(dt_bias + channel, mask=inside_c, other=0.0)
    for position in range(start, end):
        row = token + position - start
        step = _softplus(tl.load(dt + row * dt_row + channel, mask=inside_c, other=0.0).to(tl.float32) + bias)
        value = tl.load(x + row * x_row + channel, mask=inside_c, other=0.0).to(tl.float32)
        to_state = tl.load(b + row * b_row + number, mask=inside_n, other=0.0).to(tl.float32)
        from_state = tl.load(c + row * c_row + number, mask=inside_n, other=0.0).to(tl.float32)
        now = tl.exp(step[:, None] * decay) * now + (step * value)[:, None] * to_state[None, :]
        result = tl.sum(now * from_state[None, :], axis=1) + skip * value
        tl.store(out + row * channels + channel, result.to(out.dtype.element_ty), mask=inside_c)
        block = _block_to_store(block_table, seq, table_width, position, end, block_size)
        if block >= 0:
            tl.store(state + block * state_block + place, now, mask=inside)


@triton.jit
def gated_delta_rule_kernel(
    query, key, value, a, b, a_log, dt_bias, state, out, block_table, query_start_loc, seq_lens, table_width,
    block_size, state_block, num_heads, values_per_key, query_row, key_row, value_row, a_row, b_row, scale,
    DK: tl.constexpr, DV: tl.constexpr, KS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S = exp(g) S; S = S + k (beta (v - S^T k))^T; out = S^T q, with S [KS, BV]."""
    seq, head = tl.program_id(0), tl.program_id(1)
    row_k, col_v = tl.arange(0, KS), tl.program_id(2) * BV + tl.arange(0, BV)
    inside_k, inside_v = row_k < DK, col_v < DV
    token, start, end, read = _span(query_start_loc, seq_lens, block_table, seq, table_width, block_size)
    inside = inside_k[:, None] & inside_v[None, :]
    place = (head * DK + row_k)[:, None] * DV + col_v[None, :]
    now = _state_before(state + read * state_block + place, read, inside)
    rate, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    key_place = (head // values_per_key) * DK + row_k
    for position in range(start, end):
        row = token + position - start
        reading = tl.load(query + row * query_row + key_place, mask=inside_k, other=0.0).to(tl.float32)
        writing = tl.load(key + row * key_row + key_place, mask=inside_k, other=0.0).to(tl.float32)
        reading = reading * (scale / tl.sqrt(tl.sum(reading * reading, axis=0) + 1e-6))
        writing = writing * (1.0 / tl.sqrt(tl.sum(writing * writing, axis=0) + 1e-6))
        wanted = tl.load(value + row * value_row + head * DV + col_v, mask=inside_v, other=0.0).to(tl.float32)
        decay = tl.exp(rate * _softplus(tl.load(a + row * a_row + head).to(tl.float32) + bias))
        share = tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32))
        now = now * decay
        change = share * (wanted - tl.sum(now * writing[:, None], axis=0))
        now = now + writing[:, None] * change[None, :]
        result = tl.sum(now * reading[:, None], axis=0)
        tl.store(out + (row * num_heads + head) * DV + col_v, result.to(out.dtype.element_ty), mask=inside_v)
        block = _block_to_store(block_table, seq, table_width, position, end, block_size)
        if block >= 0:
            tl.store(state + block * state_block + place, now, mask=inside)


@triton.jit
def wkv_kernel(
    key, value, decay, first, state, out, block_table, query_start_loc, seq_lens, table_width, block_size,
    state_block, channels, key_row, value_row,
    BC: tl.constexpr,
):  # fmt: skip
    """The sums of weighted values and of weights, [BC] each, both divided by exp(top)."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < channels
    token, start, end, read = _span(query_start_loc, seq_lens, block_table, seq, table_width, block_size)
    before = state + read * state_block + channel
    values = tl.load(before, mask=inside, other=0.0)
    weights = tl.load(before + channels, mask=inside, other=0.0)
    top = _state_before(before + 2 * channels, read, inside)
    values, weights = tl.where(read > 0, values, 0.0), tl.where(read > 0, weights, 0.0)
    fading = tl.load(decay + channel, mask=inside, other=0.0)
    bonus = tl.load(first + channel, mask=inside, other=0.0)
    for position in range(start, end):
        row = token + position - start
        strength = tl.load(key + row * key_row + channel, mask=inside, other=0.0).to(tl.float32)
        newest = tl.load(value + row * value_row + channel, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(top, strength + bonus)
        past, new = tl.exp(top - higher), tl.exp(strength + bonus - higher)
        result = (past * values + new * newest) / (past * weights + new)
        tl.store(out + row * channels + channel, result.to(out.dtype.element_ty), mask=inside)
        higher = tl.maximum(top + fading, strength)
        past, new = tl.exp(top + fading - higher), tl.exp(strength - higher)
        values, weights, top = past * values + new * newest, past * weights + new, higher
        block = _block_to_store(block_table, seq, table_width, position, end, block_size)
        if block >= 0:
            target = state + block * state_block + channel
            tl.store(target, values, mask=inside)
            tl.store(target + channels, weights, mask=inside)
            tl.store(target + 2 * channels, top, mask=inside)
