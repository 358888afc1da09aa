"""Paged attention through torch's fused scaled-dot-product attention. Shapes and dtypes are in `declarations.py`.

One sequence at a time, so that no sequence's result depends on its neighbours. The keys and values of a sequence are a
view of the cache where its blocks follow each other, and are gathered otherwise. What depends only on where the tokens
are is worked out for the first layer of a step and kept in `layout.derived` for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.declarations import PagedLayout

__all__ = ["paged_attention"]

QUERY_PIECE = 512
"""Queries per call where an explicit mask is needed: bounds the mask to [QUERY_PIECE, kv_len]."""


@dataclass(slots=True)
class _Sequence:
    """One sequence of a step: which query rows are its own and which slots they may see."""

    query_begin: int
    query_len: int
    kv_begin: int
    """First token that any query of the step may see."""
    kv_len: int
    """Tokens from `kv_begin` to the end of the sequence."""
    run_begin: int
    """First slot, when the slots follow each other; else -1."""
    slots: Tensor | None
    """[kv_len] int64 slots, when they do not."""


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Op `paged_attention`."""
    key = ("torch", sliding_window)
    plan = layout.derived.get(key)
    if plan is None:
        plan = layout.derived[key] = _plan(layout, sliding_window)
    num_blocks, block_size, _, num_kv_heads, head_dim = kv_cache.shape
    slots = kv_cache.view(num_blocks * block_size, 2, num_kv_heads, head_dim)
    out = torch.empty_like(query)
    attend = _attend if soft_cap is None else _attend_soft_capped
    for seq in plan:
        pairs = _keys_and_values(slots, seq).to(query.dtype)
        end = seq.query_begin + seq.query_len
        keys, values = pairs[:, 0].transpose(0, 1), pairs[:, 1].transpose(0, 1)  # [Hkv, L, D]
        queries = query[seq.query_begin : end]
        out[seq.query_begin : end] = attend(queries, keys, values, scale, sliding_window, soft_cap)
    return out


def _plan(layout: PagedLayout, sliding_window: int | None) -> list[_Sequence]:
    """Slots and query rows of each sequence of the step."""
    plan: list[_Sequence] = []
    query_begin = 0
    block_size = layout.block_size
    for row, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        kv_begin = 0 if sliding_window is None else max(0, kv_len - query_len + 1 - sliding_window)
        first_block = kv_begin // block_size
        blocks = layout.block_table[row, first_block : -(-kv_len // block_size)].long()
        offset = kv_begin - first_block * block_size
        num_seen = kv_len - kv_begin
        run_begin, slots = int(blocks[0]) * block_size + offset, None
        if blocks.numel() > 1 and not bool((blocks[1:] - blocks[:-1] == 1).all()):
            run_begin = -1
            within = torch.arange(block_size, device=blocks.device)
            slots = (blocks[:, None] * block_size + within).flatten()[offset : offset + num_seen]
        plan.append(_Sequence(query_begin, query_len, kv_begin, num_seen, run_begin, slots))
        query_begin += query_len
    return plan


def _keys_and_values(slots: Tensor, seq: _Sequence) -> Tensor:
    """[kv_len, 2, Hkv, D]: a view where the slots follow each other, else a copy."""
    if seq.slots is None:
        return slots[seq.run_begin : seq.run_begin + seq.kv_len]
    return slots.index_select(0, seq.slots)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None, soft_cap: float | None
) -> Tensor:
    """query [q, Hq, D], keys and values [Hkv, L, D] -> [q, Hq, D]."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, kv_len, _ = keys.shape
    keys, values = keys[None], values[None]
    if query_len == 1:
        # The query heads of a group stand where query tokens would: no key is repeated, and nothing is masked.
        grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).view(1, num_heads, head_dim)
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
        mask = _visible(context_len + begin, context_len + end, first, last, sliding_window, query.device)
        seen = (keys[:, :, first:last], values[:, :, first:last])
        piece = F.scaled_dot_product_attention(
            heads[:, :, begin:end], *seen, attn_mask=mask, scale=scale, enable_gqa=True
        )
        pieces.append(piece[0].transpose(0, 1))
    return torch.cat(pieces)


def _attend_soft_capped(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None, soft_cap: float | None
) -> Tensor:
    """As `_attend`, with the scores in the open: torch's fused operator has no soft cap."""
    assert soft_cap is not None
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, kv_len, _ = keys.shape
    context_len = kv_len - query_len
    pieces = []
    for begin in range(0, query_len, QUERY_PIECE):
        end = min(begin + QUERY_PIECE, query_len)
        grouped = query[begin:end].view(end - begin, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("qhgd,hld->hgql", grouped.float(), keys.float()) * scale
        scores = soft_cap * torch.tanh(scores / soft_cap)
        mask = _visible(context_len + begin, context_len + end, 0, kv_len, sliding_window, query.device)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        out = torch.einsum("hgql,hld->qhgd", weights, values.float()).to(query.dtype)
        pieces.append(out.reshape(end - begin, num_heads, head_dim))
    return torch.cat(pieces)


def _visible(
    begin: int, end: int, first: int, last: int, sliding_window: int | None, device: torch.device
) -> Tensor:
    """[end - begin, last - first] bool: may the query at this position see the key at that position."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, last, device=device)
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    return visible
