"""Attention over parts of a sequence, and the merge of what the parts give: decode context parallelism, where each rank
has some of a sequence's tokens.

With the logarithm of the sum of a part's weights, the log-sum-exp, results over disjoint sets of tokens make the result
over all of them (Milakov & Gimelshein 2018, sec. 3; Dao et al. 2023, "Flash-Decoding").

Shape legend: T tokens, Hq query heads, Hkv key-value heads, D head dimension, W numbers of a latent cache's entry, X
elements of its row (`latent_attention.py`), N parts, L tokens seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_ops.attention_plan import AttentionPlan, make_plan
from quire_ops.kv_format import decode_rows, rows_of
from quire_ops.kv_reference import decode_row, read_row
from quire_ops.latent_format import decode_latent_row, decode_latents
from quire_ops.layout import PagedLayout
from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["latent_attention_with_lse", "merge_attention_states", "paged_attention_with_lse"]

QUERY_PIECE = 512
"""Queries whose scores the torch backend holds at once."""

Gather = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Slots [L] -> keys [L, Hkv, D] and values [L, Hkv, V], float32."""


@op
def paged_attention_with_lse(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    visible_lens: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    kv_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of this step's tokens, each over the first tokens that the cache has of its own sequence, which
    may be none; and the log-sum-exp of each head's scores, by which `merge_attention_states` joins it with attention
    over other tokens. Slots that no token of the step may see are never read.

    Args:
        query: [T, Hq, D].
        kv_cache: [num_blocks, 2, Hkv, block_size, X].
        layout: Where the tokens of the step's sequences are. Its `kv_lens` count tokens in this cache, and its
            `query_lens` those of the step, whether they are in this cache or not.
        visible_lens: [T] int32: how many tokens of its sequence each token sees. They do not fall within a sequence,
            whose last one sees all `kv_lens`.
        scale: Factor of the scores.
        soft_cap: c, then scores become c * tanh(score / c).
        kv_scale: [2, Hkv] float32, of an fp8 cache.
        alibi_slopes: [Hq], what a head's scores lose for each token between a key and the last that is seen.

    Returns:
        [T, Hq, D] float32, zeros for tokens that see nothing, and [T, Hq] float32, -inf for these.
    """
    num_kv_heads, block_size = kv_cache.shape[2:4]
    scales = torch.ones(2, num_kv_heads) if kv_scale is None else kv_scale
    group_size = query.shape[1] // num_kv_heads
    out, lse = query.new_zeros(query.shape, dtype=torch.float32), query.new_full(query.shape[:2], -torch.inf).float()
    for token, blocks, visible in _tokens(layout, visible_lens):
        if not visible:
            continue
        rows = [
            decode_row(
                read_row(kv_cache[blocks[place // block_size], which, head], place % block_size),
                float(scales[which, head]),
            )
            for place in range(visible)
            for which in range(2)
            for head in range(num_kv_heads)
        ]
        pairs = torch.stack(rows).view(visible, 2, num_kv_heads, -1).repeat_interleave(group_size, dim=2)
        scores = torch.einsum("hd,lhd->hl", query[token].double(), pairs[:, 0]) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None] * torch.arange(visible - 1, -1, -1)
        lse[token] = torch.logsumexp(scores, dim=-1)
        out[token] = torch.einsum("hl,lhd->hd", torch.softmax(scores, dim=-1), pairs[:, 1])
    return out, lse


@op
def latent_attention_with_lse(
    query: Tensor, latent_cache: Tensor, layout: PagedLayout, visible_lens: Tensor, *, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """`latent_attention` of each token over the first entries that the cache has of its own sequence, and the
    log-sum-exp of each head's scores; layout and visible_lens as in `paged_attention_with_lse`.

    query [T, Hq, W], latent_cache [num_blocks, block_size, X], visible_lens [T] int32 -> [T, Hq, rank] float32 and
    [T, Hq] float32; zeros and -inf for tokens that see nothing."""
    out, lse = query.new_zeros(*query.shape[:2], rank).float(), query.new_full(query.shape[:2], -torch.inf).float()
    block_size = latent_cache.shape[1]
    for token, blocks, visible in _tokens(layout, visible_lens):
        if not visible:
            continue
        rows = [latent_cache[blocks[place // block_size], place % block_size] for place in range(visible)]
        seen = torch.stack([decode_latent_row(row, rank) for row in rows])
        scores = query[token].double() @ seen.T * scale
        lse[token] = torch.logsumexp(scores, dim=-1)
        out[token] = (torch.softmax(scores, dim=-1) @ seen[:, :rank]).float()
    return out, lse


@op
def merge_attention_states(out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention over all tokens from that over disjoint parts of them: the results weighted by exp(lse). A part with
    nothing has -inf; where all have, the result is zeros.

    out [N, T, Hq, D] float32, lse [N, T, Hq] float32, sinks [Hq] one more score of each head, which has no value ->
    [T, Hq, D] float32."""
    weights = torch.exp(lse.double())
    total = weights.sum(dim=0) if sinks is None else weights.sum(dim=0) + torch.exp(sinks.double())
    merged = (weights[..., None] * out.double()).sum(dim=0) / total[..., None]
    return torch.where(total[..., None] == 0, 0.0, merged).float()


def _tokens(layout: PagedLayout, visible_lens: Tensor) -> list[tuple[int, list[int], int]]:
    """Each token of the step: its number, the blocks of its sequence, and how many tokens it sees."""
    tables = layout.block_table.tolist()
    rows = [row for row, count in enumerate(layout.query_lens) for _ in range(count)]
    return [
        (token, tables[row], visible)
        for token, (row, visible) in enumerate(zip(rows, visible_lens.tolist(), strict=True))
    ]


@torch_backend_for(paged_attention_with_lse)
def _torch_paged_attention_with_lse(
    query: Tensor,
    kv_cache: Tensor,
    layout: PagedLayout,
    visible_lens: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    kv_scale: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_kv_heads, block_size = kv_cache.shape[2:4]

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = [part[slots // block_size, :, :, slots % block_size] for part in rows_of(kv_cache)]
        keys, values = decode_rows(rows, torch.float32, None if kv_scale is None else kv_scale[..., None]).unbind(1)
        return keys, values

    def changed(scores: Tensor, distance: Tensor) -> Tensor:
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float().view(num_kv_heads, -1, 1, 1) * distance
        return scores

    return _attend(query, query.shape[2], gather, layout, visible_lens, scale, changed)


@torch_backend_for(latent_attention_with_lse)
def _torch_latent_attention_with_lse(
    query: Tensor, latent_cache: Tensor, layout: PagedLayout, visible_lens: Tensor, *, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    block_size = latent_cache.shape[1]

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = decode_latents(latent_cache[slots // block_size, slots % block_size], torch.float32, rank)[:, None]
        return rows, rows[..., :rank]

    return _attend(query, rank, gather, layout, visible_lens, scale, lambda scores, distance: scores)


@torch_backend_for(merge_attention_states)
def _torch_merge_attention_states(out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
    """In the order of the parts."""
    highest = lse.amax(dim=0) if sinks is None else torch.maximum(lse.amax(dim=0), sinks.float())
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = torch.exp(lse - highest)
    merged, total = weights[0, ..., None] * out[0], weights[0]
    for part in range(1, len(out)):
        merged, total = merged + weights[part, ..., None] * out[part], total + weights[part]
    if sinks is not None:
        total = total + torch.exp(sinks.float() - highest)
    return merged / total.masked_fill(total == 0, 1.0)[..., None]


def _attend(
    query: Tensor,
    value_dim: int,
    gather: Gather,
    layout: PagedLayout,
    visible_lens: Tensor,
    scale: float,
    changed: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Sequence by sequence, or in groups of sequences with one query each. changed: scores [..., L], and how far each
    key stands before the last that the query sees."""
    plan: AttentionPlan | None = layout.derived.get("torch lse")
    if plan is None:
        plan = layout.derived["torch lse"] = make_plan(layout, 8 * query.shape[2], torch.float32, None)
    out = query.new_zeros(*query.shape[:2], value_dim, dtype=torch.float32)
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    for seq in plan.prefills:
        keys, values = gather(seq.slots)
        places = torch.arange(seq.kv_len, device=query.device)
        for begin in range(seq.query_begin, seq.query_begin + seq.query_len, QUERY_PIECE):
            rows = slice(begin, min(begin + QUERY_PIECE, seq.query_begin + seq.query_len))
            distance = visible_lens[rows, None] - 1 - places  # [q, L]
            grouped = query[rows].float().unflatten(1, (keys.shape[1], -1))
            scores = changed(torch.einsum("qhgd,lhd->hgql", grouped, keys) * scale, distance)
            weights, sums = _weights(scores.masked_fill(distance < 0, -torch.inf))
            out[rows] = torch.einsum("hgql,lhd->qhgd", weights, values).flatten(1, 2)
            lse[rows] = sums.permute(2, 0, 1).flatten(1)
    order, begin = plan.decode_order, 0
    for group in plan.decodes:
        end = begin + group.num_sequences
        members = torch.arange(begin, end, device=query.device) if order is None else order[begin:end]
        keys, values = (part.unflatten(0, (group.num_sequences, -1)) for part in gather(group.slots))  # [n, L, Hkv, D]
        grouped = query[members].float().unflatten(1, (keys.shape[2], -1))
        places = torch.arange(group.kv_len, device=query.device)
        distance = visible_lens[members, None] - 1 - places  # [n, L]
        scores = changed(torch.einsum("nhgd,nlhd->hgnl", grouped, keys) * scale, distance)
        weights, sums = _weights(scores.masked_fill(distance < 0, -torch.inf))
        out[members] = torch.einsum("hgnl,nlhd->nhgd", weights, values).flatten(1, 2)
        lse[members] = sums.permute(2, 0, 1).flatten(1)
        begin = end
    return out, lse


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of scores [..., L], zeros where all of them are -inf; and their log-sum-exp."""
    sums = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0.0)[..., None]), sums
