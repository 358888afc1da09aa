"""Paged attention through torch's fused scaled-dot-product attention.

Every sequence's keys and values are gathered, then attended to. Decoding sequences of about the same length share a
call where calls would cost more than padding. What depends only on where the tokens are is worked out for the first
layer of a step (`attention_plan.py`) and kept in `layout.derived` for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_interfaces import ATTENTION_WORKSPACE
from quire_ops import attention_ops
from quire_ops.attention_plan import AttentionPlan, DecodeGroup, PrefillSequence, make_plan
from quire_ops.kv_format import decode_rows, rows_of
from quire_ops.layout import PagedLayout
from quire_ops.table import torch_backend_for

__all__ = [
    "GatherRows",
    "attend",
    "biased_paged_attention",
    "paged_attention",
    "relative_paged_attention",
    "tempered_paged_attention",
]

GatherRows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Slots [L] -> the keys and values there, [L, Hkv, D] each, in the dtype of the queries."""

QUERY_PIECE = 512
"""Queries per call where an explicit mask is needed: bounds the mask to [QUERY_PIECE, kv_len]."""


@torch_backend_for(attention_ops.paged_attention, trees=True)
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
) -> Tensor:
    cache = _Cache(kv_cache, kv_scale)
    plan = _plan(query, kv_cache, layout, sliding_window)
    if soft_cap is not None or sinks is not None or alibi_slopes is not None:
        return _attend_unfused(query, cache, plan, scale, sliding_window, soft_cap, sinks, alibi_slopes)
    return attend(query, partial(cache.keys_and_values, dtype=query.dtype), plan, scale, sliding_window)


@torch_backend_for(attention_ops.biased_paged_attention)
def biased_paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    bias: Tensor,
    kv_scale: Tensor | None = None,
) -> Tensor:
    plan = _plan(query, kv_cache, layout, None)
    return _attend_unfused(query, _Cache(kv_cache, kv_scale), plan, scale, bias=bias)


@torch_backend_for(attention_ops.relative_paged_attention)
def relative_paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    relative: Tensor,
    profiles: Tensor,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> Tensor:
    plan = _plan(query, kv_cache, layout, sliding_window)
    mixed = _MixedBias(relative, profiles.float(), sinks)
    return _attend_unfused(query, _Cache(kv_cache, kv_scale), plan, scale, sliding_window, mixed=mixed)


@torch_backend_for(attention_ops.tempered_paged_attention)
def tempered_paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    soft_cap: float,
    factors: Tensor,
    kv_scale: Tensor | None = None,
) -> Tensor:
    plan = _plan(query, kv_cache, layout, None)
    return _attend_unfused(query, _Cache(kv_cache, kv_scale), plan, scale, soft_cap=soft_cap, factors=factors)


def _plan(query: Tensor, kv_cache: Tensor, layout: PagedLayout, sliding_window: int | None) -> AttentionPlan:
    key = ("torch", sliding_window)
    plan: AttentionPlan | None = layout.derived.get(key)
    if plan is None:
        gathered_bytes = 2 * kv_cache.shape[2] * query.shape[2] * query.itemsize
        plan = layout.derived[key] = make_plan(layout, gathered_bytes, query.dtype, sliding_window)
    return plan


def attend(
    query: Tensor, gather: GatherRows, plan: AttentionPlan, scale: float, sliding_window: int | None = None
) -> Tensor:
    """query [T, Hq, D] -> [T, Hq, D]: causal softmax attention over what `gather` finds."""
    if plan.decode_order is None and not plan.prefills and len(plan.decodes) == 1:
        return _decode(query, gather, plan.decodes[0], scale)
    out = torch.empty_like(query)
    for seq in plan.prefills:
        rows = slice(seq.query_begin, seq.query_begin + seq.query_len)
        out[rows] = _prefill(query[rows], gather, seq, scale, sliding_window)
    if plan.decodes:
        decoding = query if plan.decode_order is None else query.index_select(0, plan.decode_order)
        parts = []
        begin = 0
        for group in plan.decodes:
            end = begin + group.num_sequences
            parts.append(_decode(decoding[begin:end], gather, group, scale))
            begin = end
        decoded = torch.cat(parts)
        if plan.decode_order is None:
            return decoded
        out.index_copy_(0, plan.decode_order, decoded)
    return out


class _Cache(NamedTuple):
    """A layer's cache, and what its numbers are multiples of."""

    kv_cache: Tensor
    kv_scale: Tensor | None

    def pairs(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, 2, Hkv, D] keys and values of these slots."""
        block_size = self.kv_cache.shape[3]
        rows = [part[slots // block_size, :, :, slots % block_size] for part in rows_of(self.kv_cache)]
        return decode_rows(rows, dtype, None if self.kv_scale is None else self.kv_scale[..., None])

    def keys_and_values(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[tokens, Hkv, D] each."""
        pairs = self.pairs(slots, dtype)
        return pairs[:, 0], pairs[:, 1]


class _MixedBias(NamedTuple):
    """Biases by distance that each query mixes for itself."""

    relative: Tensor
    """[T, Hq, R]."""
    profiles: Tensor
    """[R, M] float32."""
    sinks: Tensor | None
    """[T, Hq]: of each query one more score, without a value."""

    def at(self, rows: slice, distance: Tensor) -> Tensor:
        """[Hq, q, L] float32 of these queries, whose keys are so far before them: distance [q, L]."""
        extent = self.profiles.shape[1]
        by_distance = (self.relative[rows].float() @ self.profiles).transpose(0, 1)  # [Hq, q, M]
        bias = by_distance.gather(2, distance.clamp(0, extent - 1).expand(len(by_distance), -1, -1))
        return bias.masked_fill_(distance >= extent, 0.0)


def _decode(query: Tensor, gather: GatherRows, group: DecodeGroup, scale: float) -> Tensor:
    """query [n, Hq, D], one token of each sequence of the group -> [n, Hq, D]."""
    n, num_heads, head_dim = query.shape
    keys, values = (part.unflatten(0, (n, -1)).transpose(1, 2) for part in gather(group.slots))  # [n, Hkv, L, D]
    if query.dtype == torch.bfloat16:
        # One row per head: torch's bfloat16 kernel is faster with vectors than with matrices of few rows.
        out = F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=group.mask, scale=scale, enable_gqa=True
        )
        return out[:, :, 0]
    # The query heads of a group stand where query tokens would: keys are read once for all of them.
    num_kv_heads = keys.shape[1]
    grouped = query.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scale)
    return out.reshape(n, num_heads, head_dim)


def _prefill(
    query: Tensor, gather: GatherRows, seq: PrefillSequence, scale: float, sliding_window: int | None
) -> Tensor:
    """query [q, Hq, D], the last q tokens of one sequence -> [q, Hq, D]."""
    query_len, kv_len = seq.query_len, seq.kv_len
    keys, values = (part.transpose(0, 1)[None] for part in gather(seq.slots))  # [1, Hkv, L, D]
    heads = query.transpose(0, 1)[None]  # [1, Hq, q, D]
    if query_len == kv_len and (sliding_window is None or sliding_window >= kv_len):
        out = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    pieces = []
    context_len = kv_len - query_len
    for begin in range(0, query_len, QUERY_PIECE):
        end = min(begin + QUERY_PIECE, query_len)
        first = 0 if sliding_window is None else max(0, context_len + begin + 1 - sliding_window)
        last = context_len + end
        mask = _visible(context_len + begin, last, first, last, sliding_window, query.device)
        piece = F.scaled_dot_product_attention(
            heads[:, :, begin:end],
            keys[:, :, first:last],
            values[:, :, first:last],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        pieces.append(piece[0].transpose(0, 1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attend_unfused(
    query: Tensor,
    cache: _Cache,
    plan: AttentionPlan,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mixed: _MixedBias | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Attention with the scores in the open, because torch's fused operator has no soft cap, factors, sinks, slopes or
    bias."""
    out = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.kv_cache.shape[2]
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, -1, 1, 1)  # [Hkv, Hq / Hkv, 1, 1]
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float().view(num_kv_heads, -1, 1, 1)
    if bias is not None:
        bias = bias.float().view(num_kv_heads, -1, bias.shape[1])  # [Hkv, Hq / Hkv, M + 1]
    for seq in plan.all_sequences():
        pairs = cache.pairs(seq.slots, torch.float32)
        keys, values = pairs[:, 0], pairs[:, 1]  # [L, Hkv, D]
        context_len = seq.kv_len - seq.query_len
        num_queries = max(1, min(QUERY_PIECE, ATTENTION_WORKSPACE // (num_heads * seq.kv_len)))
        for begin in range(0, seq.query_len, num_queries):
            end = min(begin + num_queries, seq.query_len)
            rows = slice(seq.query_begin + begin, seq.query_begin + end)
            grouped = query[rows].float().view(end - begin, num_kv_heads, num_heads // num_kv_heads, head_dim)
            scores = torch.einsum("qhgd,lhd->hgql", grouped, keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if factors is not None:
                scores *= factors[rows, None]
            if alibi_slopes is not None:
                positions = torch.arange(seq.kv_len, device=query.device)
                scores -= alibi_slopes * (positions[context_len + begin : context_len + end, None] - positions)
            if bias is not None or mixed is not None:
                positions = torch.arange(seq.kv_len, device=query.device)
                distance = positions[context_len + begin : context_len + end, None] - positions
                if bias is not None:
                    scores += bias[:, :, distance.clamp(0, bias.shape[2] - 1)]
                if mixed is not None:
                    scores += mixed.at(rows, distance).view_as(scores)
            mask = _visible(context_len + begin, context_len + end, 0, seq.kv_len, sliding_window, query.device)
            scores = scores.masked_fill_(~mask, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.expand(-1, -1, end - begin, 1)), dim=-1)
            if mixed is not None and mixed.sinks is not None:
                own = mixed.sinks[rows].float().T.reshape(*scores.shape[:3], 1)
                scores = torch.cat((scores, own), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : seq.kv_len]
            attended = torch.einsum("hgql,lhd->qhgd", weights, values)
            out[rows] = attended.reshape(end - begin, num_heads, head_dim).to(query.dtype)
    return out


def _visible(begin: int, end: int, first: int, last: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """[end - begin, last - first] bool: may the query at this position see the key at that position."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, last, device=device)
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    return visible
