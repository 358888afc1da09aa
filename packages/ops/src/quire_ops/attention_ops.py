"""Softmax attention over the paged cache, token by token. `kv_cache_ops.py` says how a cache is laid out.

Shape legend: T tokens, Hq query heads, Hkv key-value heads (Hq is a multiple of Hkv), D head dimension, L tokens seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_ops.kv_reference import decode_row, read_row
from quire_ops.layout import PagedLayout
from quire_ops.op import op

__all__ = [
    "biased_paged_attention",
    "paged_attention",
    "relative_paged_attention",
    "tempered_paged_attention",
    "visible_places",
]


@op(trees=True)
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
    """Causal softmax attention of this step's tokens (prefill chunks and decodes mixed) over the paged keys and values
    of their own sequence. Query head h reads key-value head h // (Hq / Hkv). Slots that no token of the step may see
    are never read.

    Args:
        query: [T, Hq, D].
        kv_cache: [num_blocks, 2, Hkv, block_size, X].
        layout: Where the tokens of the step's sequences are.
        scale: Factor of the scores, usually D ** -0.5.
        sliding_window: W, then a token sees itself and the W - 1 before it.
        soft_cap: c, then scores become c * tanh(score / c).
        sinks: [Hq], one more score of each head to attend to, which has no value (gpt-oss).
        kv_scale: [2, Hkv] float32, of an fp8 cache.
        alibi_slopes: [Hq], what a head's scores lose for each token of distance (Press et al. 2022, sec. 3).
        int8_products: Over an int8 cache a backend may multiply in int8 (SageAttention, Zhang et al. 2024): queries
            rounded with a step for each, max |q| / 127; weights, times the scales of their values, with a step for each
            query and run of tokens, their largest / 255. The reference does not round.

    Returns:
        [T, Hq, D], dtype of query.
    """

    def changed(scores: Tensor, token: int) -> Tensor:
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None] * torch.arange(scores.shape[1] - 1, -1, -1)
        return scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], dim=-1)

    return _attend(query, kv_cache, layout, scale, kv_scale, changed, sliding_window)


@op
def biased_paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    bias: Tensor,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Attention of `paged_attention`, where each head adds bias[d] to the score of a key d tokens before the query, and
    bias[M] from M tokens on (T5's relative position bias, Raffel et al. 2020, sec. 2.1); bias [Hq, M + 1] -> [T, Hq,
    D].
    """

    def changed(scores: Tensor, token: int) -> Tensor:
        distance = torch.arange(scores.shape[1] - 1, -1, -1)
        return scores + bias.double()[:, distance.clamp_max(bias.shape[1] - 1)]

    return _attend(query, kv_cache, layout, scale, kv_scale, changed)


@op
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
    """Attention of `paged_attention`, where each query adds relative[h] @ profiles[:, d] to the score of a key d tokens
    before it, and nothing from M tokens on: biases by distance that each token mixes for itself (Inkling).

    relative [T, Hq, R], profiles [R, M], sinks [T, Hq], of each query one more score that has no value -> [T, Hq, D].
    """
    extent = profiles.shape[1]

    def changed(scores: Tensor, token: int) -> Tensor:
        near = min(scores.shape[1], extent)
        bias = torch.zeros_like(scores)
        bias[:, scores.shape[1] - near :] = (relative[token].double() @ profiles.double())[:, :near].flip(1)
        scores = scores + bias
        return scores if sinks is None else torch.cat([scores, sinks[token].double()[:, None]], dim=-1)

    return _attend(query, kv_cache, layout, scale, kv_scale, changed, sliding_window)


@op
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
    """Attention of `paged_attention` with a soft cap, where the capped scores of each query have a factor of its own,
    an inverse temperature of its softmax (Grok 2); factors [T] float32 -> [T, Hq, D]."""

    def changed(scores: Tensor, token: int) -> Tensor:
        return float(factors[token]) * soft_cap * torch.tanh(scores / soft_cap)

    return _attend(query, kv_cache, layout, scale, kv_scale, changed)


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    scale: float,
    kv_scale: Tensor | None,
    changed: Callable[[Tensor, int], Tensor],
    sliding_window: int | None = None,
) -> Tensor:
    """One query token at a time, over exactly the tokens that it may see. changed: scores [Hq, L] and the number of the
    token -> [Hq, L] or, with a score that has no value, [Hq, L + 1]."""
    out = torch.empty_like(query)
    group_size = query.shape[1] // kv_cache.shape[2]
    token = 0
    for blocks, query_len, kv_len in zip(layout.block_table.tolist(), layout.query_lens, layout.kv_lens, strict=True):
        seen_by = [visible_places(layout, token + i, kv_len - query_len + i, sliding_window) for i in range(query_len)]
        first = min(map(min, seen_by))
        pairs = _pairs(kv_cache, blocks, first, kv_len, kv_scale)
        for places in seen_by:
            seen = pairs[torch.tensor(places) - first]  # [L, 2, Hkv, D]
            keys = seen[:, 0].repeat_interleave(group_size, dim=1)  # [L, Hq, D]
            values = seen[:, 1].repeat_interleave(group_size, dim=1)
            scores = changed(torch.einsum("hd,lhd->hl", query[token].double(), keys) * scale, token)
            weights = torch.softmax(scores, dim=-1)[:, : len(seen)]
            out[token] = torch.einsum("hl,lhd->hd", weights, values).to(query.dtype)
            token += 1
    return out


def visible_places(layout: PagedLayout, token: int, place: int, sliding_window: int | None = None) -> list[int]:
    """Places in their sequence of the tokens that a token sees, in the order of their positions; its own, `place`, is
    the last."""
    if layout.paths is None or int(layout.paths[token, 0]) < 0:
        places = list(range(place + 1))
    else:
        position, root, *path = layout.paths[token].tolist()
        places = [*range(root), *path[: position + 1 - root]]
    return places if sliding_window is None else places[-sliding_window:]


def _pairs(kv_cache: Tensor, blocks: list[int], begin: int, end: int, kv_scale: Tensor | None) -> Tensor:
    """[end - begin, 2, Hkv, D] float64: keys and values at these places of one sequence."""
    num_kv_heads, block_size = kv_cache.shape[2:4]
    scales = torch.ones(2, num_kv_heads) if kv_scale is None else kv_scale
    rows = [
        decode_row(
            read_row(kv_cache[blocks[place // block_size], which, head], place % block_size), float(scales[which, head])
        )
        for place in range(begin, end)
        for which in range(2)
        for head in range(num_kv_heads)
    ]
    return torch.stack(rows).view(end - begin, 2, num_kv_heads, -1)
