"""The recurrent ops through torch's operators: one batched update for a step of decodes, else run by run, the tokens of
a run in chunks that are matrix products. Everything inside is float32.

Where a chunk begins depends on how a prompt was cut into steps, and so do the last bits of the results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops import recurrent
from quire_ops.layout import PagedLayout
from quire_ops.recurrent import state_runs
from quire_ops.table import torch_backend_for

__all__ = [
    "causal_conv1d",
    "channel_delta_rule",
    "dynamic_conv1d",
    "gated_delta_rule",
    "mamba2_scan",
    "selective_scan",
    "wkv",
]

CHUNK = 64
"""Tokens that are computed at once."""

CHANNEL_CHUNK = 16
"""The same where each pair of them has a number for every channel."""


@torch_backend_for(recurrent.causal_conv1d)
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, layout: PagedLayout, *, activation: str | None = None
) -> Tensor:
    num_past = state.shape[1]
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        past = state[read].masked_fill_(begins[:, None, None], 0)  # [S, K - 1, C]
        seen = torch.cat((past.to(x.dtype), x[:, None]), dim=1)
        state[write] = seen[:, 1:].to(state.dtype)
        out = (seen * weight.T).sum(1)
        if bias is not None:
            out = out + bias
    else:
        taps = weight[:, None]  # [C, 1, K]
        parts = []
        for run in state_runs(layout):
            before = state[run.read] if run.read else state.new_zeros(state.shape[1:])
            inputs = torch.cat((before.to(x.dtype), x[run.begin : run.end]))  # [K - 1 + L, C]
            parts.append(F.conv1d(inputs.T[None], taps, bias, groups=x.shape[1])[0].T)
            if run.write:
                state[run.write] = inputs[len(inputs) - num_past :]
        out = torch.cat(parts)
    return F.silu(out) if activation == "silu" else out


@torch_backend_for(recurrent.dynamic_conv1d)
def dynamic_conv1d(x: Tensor, weight: Tensor, dynamic: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    num_past, groups = state.shape[1], dynamic.shape[1]
    taps = weight.unflatten(0, (groups, -1)) + dynamic[:, :, None]  # [T, G, C / G, K]
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        past = state[read].masked_fill_(begins[:, None, None], 0)  # [S, K - 1, C]
        seen = torch.cat((past.to(x.dtype), x[:, None]), dim=1)
        state[write] = seen[:, 1:].to(state.dtype)
        out: Tensor = (seen.transpose(1, 2) * taps.flatten(1, 2)).sum(-1)
        return out
    parts = []
    for run in state_runs(layout):
        before = state[run.read] if run.read else state.new_zeros(state.shape[1:])
        inputs = torch.cat((before.to(x.dtype), x[run.begin : run.end]))  # [K - 1 + L, C]
        windows = inputs.unfold(0, num_past + 1, 1)  # [L, C, K]
        parts.append((windows * taps[run.begin : run.end].flatten(1, 2)).sum(-1))
        if run.write:
            state[run.write] = inputs[len(inputs) - num_past :]
    return torch.cat(parts)


@torch_backend_for(recurrent.mamba2_scan)
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
    """Chunks as in "state space duality" (arXiv:2405.21060, sec. 6)."""
    steps = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)  # [T, H]
    wide = x.float()
    heads_per_group = x.shape[1] // b.shape[1]
    to_state = b.float().repeat_interleave(heads_per_group, 1)  # [T, H, N]
    from_state = c.float().repeat_interleave(heads_per_group, 1)
    scaled, log_decay = steps[..., None] * wide, steps * a
    skipped = d[:, None] * wide
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        now = state[read].masked_fill_(begins[:, None, None, None], 0)  # [S, H, P, N]
        now = torch.exp(log_decay)[..., None, None] * now + scaled[..., None] * to_state[:, :, None]
        state[write] = now
        return (torch.einsum("thpn,thn->thp", now, from_state) + skipped).to(x.dtype)
    out = torch.empty_like(wide)
    for run in state_runs(layout):
        now = state[run.read] if run.read else torch.zeros_like(state[0])
        for begin in range(run.begin, run.end, CHUNK):
            part = slice(begin, min(begin + CHUNK, run.end))
            total, within = _decays(log_decay[part])  # [L, H], [H, L, L]
            scores = torch.einsum("lhn,mhn->hlm", from_state[part], to_state[part]) * within
            out[part] = torch.einsum("hlm,mhp->lhp", scores, scaled[part])
            out[part] += torch.exp(total)[..., None] * torch.einsum("lhn,hpn->lhp", from_state[part], now)
            to_end = torch.exp(total[-1] - total)
            now = torch.exp(total[-1])[:, None, None] * now + torch.einsum(
                "lhp,lhn->hpn", to_end[..., None] * scaled[part], to_state[part]
            )
        if run.write:
            state[run.write] = now
    return (out + skipped).to(x.dtype)


@torch_backend_for(recurrent.selective_scan)
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
    """Decays differ for each number of the state, so a run goes token by token."""
    steps, wide, to_state, from_state = F.softplus(dt.float() + dt_bias), x.float(), b.float(), c.float()
    scaled = steps * wide
    out = torch.empty_like(wide)
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        now = state[read].masked_fill_(begins[:, None, None], 0)  # [S, C, N]
        now = torch.exp(steps[..., None] * a) * now + scaled[..., None] * to_state[:, None]
        state[write] = now
        out = torch.einsum("tcn,tn->tc", now, from_state)
    else:
        for run in state_runs(layout):
            now = state[run.read] if run.read else torch.zeros_like(state[0])
            for token in range(run.begin, run.end):
                now = torch.exp(steps[token][:, None] * a) * now + scaled[token][:, None] * to_state[token]
                out[token] = now @ from_state[token]
            if run.write:
                state[run.write] = now
    return (out + d * wide).to(x.dtype)


@torch_backend_for(recurrent.gated_delta_rule)
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
    """Within a chunk, the changes of the state solve a triangular system (the WY form of
    arXiv:2406.06484, sec. 3.2, with the decays of arXiv:2412.06464, sec. 3.3)."""
    values_per_key = value.shape[1] // key.shape[1]
    read_keys = (_unit(query.float()) * query.shape[-1] ** -0.5).repeat_interleave(values_per_key, 1)  # [T, Hv, Dk]
    write_keys = _unit(key.float()).repeat_interleave(values_per_key, 1)
    wide, share = value.float(), torch.sigmoid(b.float())
    log_decay = -torch.exp(a_log) * F.softplus(a.float() + dt_bias)  # [T, Hv]
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        now = state[read].masked_fill_(begins[:, None, None, None], 0) * torch.exp(log_decay)[..., None, None]
        change = share[..., None] * (wide - torch.einsum("thkv,thk->thv", now, write_keys))
        now = now + write_keys[..., None] * change[:, :, None]
        state[write] = now
        return torch.einsum("thkv,thk->thv", now, read_keys).to(value.dtype)
    out = torch.empty_like(wide)
    for run in state_runs(layout):
        now = state[run.read] if run.read else torch.zeros_like(state[0])
        for begin in range(run.begin, run.end, CHUNK):
            part = slice(begin, min(begin + CHUNK, run.end))
            total, within = _decays(log_decay[part])  # [L, Hv], [Hv, L, L]
            reads, writes = read_keys[part].transpose(0, 1), write_keys[part].transpose(0, 1)  # [Hv, L, Dk]
            shares, since = share[part].T[..., None], torch.exp(total).T[..., None]  # [Hv, L, 1]
            system = shares * within.tril(-1) * (writes @ writes.transpose(1, 2))
            targets = shares * (wide[part].transpose(0, 1) - since * (writes @ now))
            change = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)  # [Hv, L, Dv]
            result = since * (reads @ now) + (within * (reads @ writes.transpose(1, 2))) @ change
            out[part] = result.transpose(0, 1)
            to_end = torch.exp(total[-1] - total).T[..., None]
            now = torch.exp(total[-1])[:, None, None] * now + (to_end * writes).transpose(1, 2) @ change
        if run.write:
            state[run.write] = now
    return out.to(value.dtype)


@torch_backend_for(recurrent.channel_delta_rule)
def channel_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor,
    layout: PagedLayout,
) -> Tensor:
    """As `gated_delta_rule`; what is left of a key between two tokens is a number for each channel."""
    read_keys, write_keys = _unit(query.float()) * query.shape[-1] ** -0.5, _unit(key.float())
    wide = value.float()
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        now = state[read].masked_fill_(begins[:, None, None, None], 0) * torch.exp(log_decay)[..., None]
        change = strength[..., None] * (wide - torch.einsum("thkv,thk->thv", now, write_keys))
        now = now + write_keys[..., None] * change[:, :, None]
        state[write] = now
        return torch.einsum("thkv,thk->thv", now, read_keys).to(value.dtype)
    out = torch.empty_like(wide)
    for run in state_runs(layout):
        now = state[run.read] if run.read else torch.zeros_like(state[0])
        for begin in range(run.begin, run.end, CHANNEL_CHUNK):
            part = slice(begin, min(begin + CHANNEL_CHUNK, run.end))
            total = log_decay[part].cumsum(0).transpose(0, 1)  # [H, L, Dk]
            reads, writes = read_keys[part].transpose(0, 1), write_keys[part].transpose(0, 1)
            later = torch.ones(2 * (total.shape[1],), dtype=torch.bool, device=total.device).triu(1)
            between = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], -torch.inf).exp()
            left = between * writes[:, None]  # [H, L, L, Dk]: what token l finds of the key of token m
            shares, since = strength[part].T[..., None], torch.exp(total)
            system = shares * torch.einsum("hlk,hlmk->hlm", writes, left).tril(-1)
            targets = shares * (wide[part].transpose(0, 1) - (since * writes) @ now)
            change = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)  # [H, L, Dv]
            result = (since * reads) @ now + torch.einsum("hlk,hlmk->hlm", reads, left) @ change
            out[part] = result.transpose(0, 1)
            now = since[:, -1, :, None] * now + left[:, -1].transpose(1, 2) @ change
        if run.write:
            state[run.write] = now
    return out.to(value.dtype)


@torch_backend_for(recurrent.wkv)
def wkv(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
    """Token by token, all sequences at once where each has one."""
    k, v = key.float(), value.float()
    if _is_decode(layout):
        read, write, begins = _decode_blocks(layout, state.device)
        now = state[read].masked_fill_(begins[:, None, None], 0).unbind(1)
        out, *after = _wkv_token(k, v, decay, first, *now)
        state[write] = torch.stack(after, dim=1)
        return out.to(value.dtype)
    results = torch.empty_like(v)
    for run in state_runs(layout):
        held = list((state[run.read] if run.read else torch.zeros_like(state[0])).unbind(0))
        for token in range(run.begin, run.end):
            results[token], *held = _wkv_token(k[token], v[token], decay, first, *held)
        if run.write:
            state[run.write] = torch.stack(held)
    return results.to(value.dtype)


def _wkv_token(
    key: Tensor, value: Tensor, decay: Tensor, first: Tensor, values: Tensor, weights: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token: its result, and the state after it from the one before it, [..., C] each."""
    top = torch.maximum(exponent, key + first)
    past, new = torch.exp(exponent - top), torch.exp(key + first - top)
    out = (past * values + new * value) / (past * weights + new)
    faded = exponent + decay
    top = torch.maximum(faded, key)
    past, new = torch.exp(faded - top), torch.exp(key - top)
    return out, past * values + new * value, past * weights + new, top


def _decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """From the logarithm of each token's decay [L, H]: its sums up to each token [L, H], and what is left at token l of
    what token m wrote [H, L, L], zeros where m is later."""
    total = log_decay.cumsum(0)
    between = total.T[:, :, None] - total.T[:, None]
    later = torch.ones(between.shape[1:], dtype=torch.bool, device=between.device).triu(1)
    return total, between.masked_fill(later, -torch.inf).exp()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _is_decode(layout: PagedLayout) -> bool:
    """Whether each sequence of the step has one token."""
    return len(layout.query_lens) == int(layout.slot_mapping.shape[0])


def _decode_blocks(layout: PagedLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Per sequence with one token: block of the state before it, block of the state after it, and whether it is the
    sequence's first. Worked out once per step."""
    decode_blocks: tuple[Tensor, Tensor, Tensor] | None = layout.derived.get("decode_blocks")
    if decode_blocks is None:
        positions = torch.tensor(layout.kv_lens, device=device) - 1
        blocks = torch.stack(((positions - 1).clamp_min(0), positions), dim=1) // layout.block_size
        pairs = layout.block_table.gather(1, blocks).long()
        decode_blocks = layout.derived["decode_blocks"] = (pairs[:, 0], pairs[:, 1], positions == 0)
    return decode_blocks
