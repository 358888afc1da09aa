"""Ops of recurrent layers, one token at a time in float64, and where a step's tokens find and leave their states.

A recurrent layer keeps, per block of a sequence, one state: the state after the last computed token of the block. A
sequence's new tokens go on from the block of the token before the first of them (from nothing at position 0). The state
is stored wherever the sequence reaches the end of a block that it has (not the null block), and after its last token;
what is stored in the null block then is nobody's, and a backend may leave it out. States are rounded to the dtype of
their cache where they are stored, and nowhere else. What is said to be given for each token may lie apart in memory.

Shape legend: T tokens, C channels, K taps of a convolution, H heads, P channels of a head, N numbers of state per
channel, G groups of heads that share what is projected, Hk and Hv key and value heads (Hv is a multiple of Hk), Dk and
Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.layout import PagedLayout
from quire_ops.op import op

__all__ = [
    "StateRun",
    "causal_conv1d",
    "channel_delta_rule",
    "dynamic_conv1d",
    "gated_delta_rule",
    "mamba2_scan",
    "selective_scan",
    "state_runs",
    "wkv",
]

Advance = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(state before, token) -> (state after, output of the token), float64."""


class StateRun(NamedTuple):
    """Tokens of one sequence between two places where its state is stored."""

    begin: int
    """First token, among the step's."""
    end: int
    read: int
    """Block of the state to go on from; 0 for none, at the beginning of a sequence."""
    write: int
    """Block that gets the state after the last token."""


def state_runs(layout: PagedLayout) -> list[StateRun]:
    """The step's tokens, cut where states are stored, each sequence's in order. Worked out once per step."""
    runs: list[StateRun] | None = layout.derived.get("state_runs")
    if runs is None:
        runs = layout.derived["state_runs"] = []
        token = 0
        tables = layout.block_table.tolist()
        for table, query_len, kv_len in zip(tables, layout.query_lens, layout.kv_lens, strict=True):
            runs += _sequence_runs(table, layout.block_size, token, kv_len - query_len, kv_len)
            token += query_len
    return runs


def _sequence_runs(table: list[int], size: int, token: int, start: int, end: int) -> list[StateRun]:
    runs = []
    read = table[(start - 1) // size] if start else 0
    begin = start
    for block in range(start // size, (end - 1) // size + 1):
        stop = min((block + 1) * size, end)
        if table[block] or stop == end:
            runs.append(StateRun(token + begin - start, token + stop - start, read, table[block]))
            begin, read = stop, table[block]
    return runs


def _scan(state: Tensor, layout: PagedLayout, out: Tensor, advance: Advance) -> Tensor:
    for run in state_runs(layout):
        now = state[run.read].double() if run.read else torch.zeros_like(state[0], dtype=torch.float64)
        for token in range(run.begin, run.end):
            now, result = advance(now, token)
            out[token] = result.to(out.dtype)
        if run.write:
            state[run.write] = now.to(state.dtype)
    return out


@op(token_args=(0,))
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, layout: PagedLayout, *, activation: str | None = None
) -> Tensor:
    """Depthwise convolution over the last K tokens of the own sequence: out[t] = act(bias + sum over k of weight[:, k]
    * x[t - K + 1 + k]), zeros before the beginning. The state is the last K - 1 inputs. activation: "silu" or None.

    x [T, C], weight [C, K] and bias [C] of x's dtype, state [num_blocks, K - 1, C] float32 -> [T, C]."""

    def advance(past: Tensor, token: int) -> tuple[Tensor, Tensor]:
        seen = torch.cat((past, x[token].double()[None]))  # [K, C]
        out = (seen * weight.double().T).sum(0)
        if bias is not None:
            out = out + bias.double()
        return seen[1:], out * torch.sigmoid(out) if activation == "silu" else out

    return _scan(state, layout, torch.empty_like(x), advance)


@op(token_args=(0, 2))
def dynamic_conv1d(x: Tensor, weight: Tensor, dynamic: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    """`causal_conv1d` without a bias, whose taps are the sum of a weight and of what each token brings for each group
    of neighbouring channels.

    x [T, C], weight [C, K] and dynamic [T, G, K] of x's dtype, state [num_blocks, K - 1, C] float32 -> [T, C]."""
    width = x.shape[1] // dynamic.shape[1]

    def advance(past: Tensor, token: int) -> tuple[Tensor, Tensor]:
        seen = torch.cat((past, x[token].double()[None]))  # [K, C]
        taps = weight.double() + dynamic[token].double().repeat_interleave(width, 0)  # [C, K]
        return seen[1:], (seen * taps.T).sum(0)

    return _scan(state, layout, torch.empty_like(x), advance)


@op(token_args=(0, 1, 3, 4))
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    layout: PagedLayout,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """State space with a scalar decay per head (Dao & Gu 2024, arXiv:2405.21060, sec. 2): with
    s = clamp(softplus(dt + dt_bias), dt_limit): h = exp(s * a) * h + s * x b^T; out = h c + d * x. Head i reads group
    i // (H / G).

    x [T, H, P], dt [T, H], a [H] float32, b [T, G, N], c [T, G, N], d [H] float32, dt_bias [H] float32,
    state [num_blocks, H, P, N] float32 -> [T, H, P], dtype of x."""
    heads_per_group = x.shape[1] // b.shape[1]

    def advance(before: Tensor, token: int) -> tuple[Tensor, Tensor]:
        step = softplus(dt[token].double() + dt_bias.double()).clamp(*dt_limit)  # [H]
        wide = x[token].double()  # [H, P]
        to_state = b[token].double().repeat_interleave(heads_per_group, 0)  # [H, N]
        from_state = c[token].double().repeat_interleave(heads_per_group, 0)
        decay = torch.exp(step * a.double())
        after = decay[:, None, None] * before + (step[:, None] * wide)[:, :, None] * to_state[:, None]
        return after, (after * from_state[:, None]).sum(-1) + d.double()[:, None] * wide

    return _scan(state, layout, torch.empty(x.shape, dtype=x.dtype, device=x.device), advance)


@op(token_args=(0, 1, 3, 4))
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    layout: PagedLayout,
) -> Tensor:
    """State space with a decay per channel and state (Gu & Dao 2023, arXiv:2312.00752, sec. 3.2): with
    s = softplus(dt + dt_bias): h = exp(s * a) * h + s * x b^T; out = h c + d * x.

    x [T, C], dt [T, C], a [C, N] float32, b [T, N], c [T, N], d [C] float32, dt_bias [C] float32,
    state [num_blocks, C, N] float32 -> [T, C], dtype of x."""

    def advance(before: Tensor, token: int) -> tuple[Tensor, Tensor]:
        step = softplus(dt[token].double() + dt_bias.double())[:, None]  # [C, 1]
        wide = x[token].double()
        after = torch.exp(step * a.double()) * before + step * wide[:, None] * b[token].double()
        return after, (after * c[token].double()).sum(-1) + d.double() * wide

    return _scan(state, layout, torch.empty(x.shape, dtype=x.dtype, device=x.device), advance)


@op(token_args=(0, 1, 2, 3, 4))
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    layout: PagedLayout,
) -> Tensor:
    """Linear attention with a decay and the delta rule (Yang et al. 2024, arXiv:2412.06464, eq. 10): with query and key
    brought to length 1 (eps 1e-6 under the root), query divided by sqrt(Dk), and
    g = -exp(a_log) * softplus(a + dt_bias): S = exp(g) * S; S = S + key (sigmoid(b) * (value - S^T key))^T;
    out = S^T query. Value head i reads key head i // (Hv / Hk).

    query [T, Hk, Dk], key [T, Hk, Dk], value [T, Hv, Dv], a [T, Hv], b [T, Hv], a_log [Hv] float32,
    dt_bias [Hv] float32, state [num_blocks, Hv, Dk, Dv] float32 -> [T, Hv, Dv], dtype of value."""
    values_per_key = value.shape[1] // key.shape[1]

    def advance(before: Tensor, token: int) -> tuple[Tensor, Tensor]:
        read = _unit(query[token].double()).repeat_interleave(values_per_key, 0) * query.shape[-1] ** -0.5  # [Hv, Dk]
        write = _unit(key[token].double()).repeat_interleave(values_per_key, 0)
        log_decay = -torch.exp(a_log.double()) * softplus(a[token].double() + dt_bias.double())
        decayed = torch.exp(log_decay)[:, None, None] * before
        change = value[token].double() - (decayed * write[:, :, None]).sum(1)  # [Hv, Dv]
        after = decayed + write[:, :, None] * (torch.sigmoid(b[token].double())[:, None] * change)[:, None]
        return after, (after * read[:, :, None]).sum(1)

    return _scan(state, layout, torch.empty(value.shape, dtype=value.dtype, device=value.device), advance)


@op(token_args=(0, 1, 2, 3, 4))
def channel_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor,
    layout: PagedLayout,
) -> Tensor:
    """The delta rule with a decay for each channel of the keys (Kimi Team 2025, arXiv:2510.26692, eq. 1): with query
    and key brought to length 1 (eps 1e-6 under the root), and query divided by sqrt(Dk): S = exp(log_decay) * S, row
    by row; S = S + key (strength * (value - S^T key))^T; out = S^T query.

    query [T, H, Dk], key [T, H, Dk], value [T, H, Dv], log_decay [T, H, Dk] float32, at most 0, strength [T, H]
    float32, state [num_blocks, H, Dk, Dv] float32 -> [T, H, Dv], dtype of value."""

    def advance(before: Tensor, token: int) -> tuple[Tensor, Tensor]:
        read, write = _unit(query[token].double()) * query.shape[-1] ** -0.5, _unit(key[token].double())  # [H, Dk]
        decayed = torch.exp(log_decay[token].double())[:, :, None] * before
        change = value[token].double() - (decayed * write[:, :, None]).sum(1)  # [H, Dv]
        after = decayed + write[:, :, None] * (strength[token].double()[:, None] * change)[:, None]
        return after, (after * read[:, :, None]).sum(1)

    return _scan(state, layout, torch.empty(value.shape, dtype=value.dtype, device=value.device), advance)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), without overflow."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@op(token_args=(0, 1))
def wkv(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    """Average of the values so far, weighted by exp(key), all but the newest by exp(decay) less for each token since,
    the newest by exp(first) more (Peng et al. 2023, RWKV, arXiv:2305.13048, eq. 16). The state is the sum of weighted
    values and the sum of weights, both divided by exp(m), and m.

    key [T, C], value [T, C], decay [C] float32, first [C] float32, state [num_blocks, 3, C] float32 -> [T, C], dtype of
    value."""
    decay, first = decay.double(), first.double()

    def advance(now: Tensor, token: int) -> tuple[Tensor, Tensor]:
        values, weights, exponent = now
        k, v = key[token].double(), value[token].double()
        top = torch.maximum(exponent, k + first)
        past, new = torch.exp(exponent - top), torch.exp(k + first - top)
        out = (past * values + new * v) / (past * weights + new)
        top = torch.maximum(exponent + decay, k)
        past, new = torch.exp(exponent + decay - top), torch.exp(k - top)
        return torch.stack((past * values + new * v, past * weights + new, top)), out

    return _scan(state, layout, torch.empty_like(value), advance)
