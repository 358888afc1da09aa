"""The reference of the recurrent ops: one token at a time, in float64. Shapes are in `recurrent.py`.

States are rounded to the dtype of their cache where they are stored, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_ops.layout import PagedLayout
from quire_ops.recurrent import state_runs

__all__ = ["causal_conv1d", "gated_delta_rule", "mamba2_scan", "selective_scan", "wkv"]

Advance = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(state before, token) -> (state after, output of the token), float64."""


def _scan(state: Tensor, layout: PagedLayout, out: Tensor, advance: Advance) -> Tensor:
    for run in state_runs(layout):
        now = state[run.read].double() if run.read else torch.zeros_like(state[0], dtype=torch.float64)
        for token in range(run.begin, run.end):
            now, result = advance(now, token)
            out[token] = result.to(out.dtype)
        if run.write:
            state[run.write] = now.to(state.dtype)
    return out


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, layout: PagedLayout, *, activation: str | None = None
) -> Tensor:
    """Op `causal_conv1d`."""

    def advance(past: Tensor, token: int) -> tuple[Tensor, Tensor]:
        seen = torch.cat((past, x[token].double()[None]))  # [K, C]
        out = (seen * weight.double().T).sum(0)
        if bias is not None:
            out = out + bias.double()
        return seen[1:], out * torch.sigmoid(out) if activation == "silu" else out

    return _scan(state, layout, torch.empty_like(x), advance)


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
    """Op `mamba2_scan`."""
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
    """Op `selective_scan`."""

    def advance(before: Tensor, token: int) -> tuple[Tensor, Tensor]:
        step = softplus(dt[token].double() + dt_bias.double())[:, None]  # [C, 1]
        wide = x[token].double()
        after = torch.exp(step * a.double()) * before + step * wide[:, None] * b[token].double()
        return after, (after * c[token].double()).sum(-1) + d.double() * wide

    return _scan(state, layout, torch.empty(x.shape, dtype=x.dtype, device=x.device), advance)


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
    """Op `gated_delta_rule`."""
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


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), without overflow."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def wkv(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    """Op `wkv`."""
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
