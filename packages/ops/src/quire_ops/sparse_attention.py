"""Sparse latent attention: which tokens to attend to, where they are, and attention over these alone (DeepSeek-AI 2025,
DeepSeek-V3.2-Exp).

Shape legend: T tokens, Hq query heads, Hi heads of the index, D their dimension, W numbers of a cache entry, X elements
of its row (`latent_attention.py`), K tokens attended to, L tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire_ops.attention_plan import AttentionPlan, PrefillSequence
from quire_ops.latent_format import decode_latent_row, decode_latents
from quire_ops.layout import PagedLayout
from quire_ops.op import op
from quire_ops.staging import to_device
from quire_ops.table import torch_backend_for

__all__ = [
    "index_topk",
    "pooled_index_topk",
    "position_slots",
    "sparse_latent_attention",
    "sparse_latent_attention_with_lse",
    "torch_index_topk",
    "torch_sparse_latent_attention",
]

WORKSPACE = 1 << 22
"""Numbers that the torch backend holds at once for the tokens of one call."""


@op
def index_topk(query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout, *, k: int) -> Tensor:
    """Positions of the k tokens of its own sequence, up to itself, that a token has the largest scores for: sum over h
    of weights[h] * relu(query[h] . key) (lightning indexer, eq. 1). Their order, and which of equals, is left open.
    Entries of the cache may be parts of longer ones.

    query [T, Hi, D], weights [T, Hi] float32, key_cache [num_blocks, block_size, D] -> [T, K] int64, K = min(k, tokens
    of the longest sequence); -1 behind the positions where there are fewer."""
    out = torch.full((len(query), min(k, max(layout.kv_lens))), -1, device=query.device)
    for token, position, blocks in tokens_of(layout):
        slots = [(blocks[seen // layout.block_size], seen % layout.block_size) for seen in range(position + 1)]
        keys = torch.stack([key_cache[slot] for slot in slots]).double()  # [L, D]
        scores = weights[token].double() @ torch.relu(query[token].double() @ keys.T)
        best = torch.sort(scores, descending=True, stable=True).indices[: out.shape[1]]
        out[token, : len(best)] = best
    return out


@op
def pooled_index_topk(
    query: Tensor, weights: Tensor, state_cache: Tensor, position_bias: Tensor, layout: PagedLayout, *, k: int
) -> Tensor:
    """Positions of the tokens of the k pools of its own sequence that a token has the largest scores for, as
    `index_topk` scores them, and of those behind the last whole pool, up to itself; largest first. A pool is P tokens
    that follow each other, all of them before or at the token; its key is the mean of their keys, each dimension
    weighted by a softmax over them of their gates and the bias of their place. Entries of the cache may be parts of
    longer ones.

    query [T, Hi, D], weights [T, Hi] float32, state_cache [num_blocks, block_size, 2 D] of keys and gates,
    position_bias [P, D] float32 -> [T, K] int64, K = min(k * P + P - 1, tokens of the longest sequence); -1 behind the
    positions where there are fewer."""
    pool, size = position_bias.shape
    out = torch.full((len(query), min(k * pool + pool - 1, max(layout.kv_lens))), -1, device=query.device)
    for token, position, blocks in tokens_of(layout):
        slots = [(blocks[seen // layout.block_size], seen % layout.block_size) for seen in range(position + 1)]
        whole = (position + 1) // pool
        found = list(range(whole * pool, position + 1))
        if whole:
            states = (
                torch.stack([state_cache[slot] for slot in slots[: whole * pool]]).double().unflatten(0, (-1, pool))
            )
            shares = torch.softmax(states[..., size:] + position_bias.double(), dim=1)
            keys = (shares * states[..., :size]).sum(dim=1)  # [pools, D]
            scores = weights[token].double() @ torch.relu(query[token].double() @ keys.T)
            best = torch.sort(scores, descending=True, stable=True).indices[:k].tolist()
            found += [each * pool + place for each in best for place in range(pool)]
        out[token, : len(found)] = torch.tensor(sorted(found, reverse=True))
    return out


@op
def position_slots(positions: Tensor, layout: PagedLayout) -> Tensor:
    """The slot of each position in the sequence of the token, block id * block_size + offset, and -1 for -1; positions
    [T, K] int64 -> [T, K] int64."""
    out = torch.full_like(positions, -1)
    for token, _, blocks in tokens_of(layout):
        for column, position in enumerate(positions[token].tolist()):
            if position >= 0:
                block, offset = divmod(position, layout.block_size)
                out[token, column] = blocks[block] * layout.block_size + offset
    return out


@op
def sparse_latent_attention(query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int) -> Tensor:
    """`latent_attention` of each token over the entries in its own slots alone; slots of -1, which the first of a token
    is not, count for nothing. Other slots are never read.

    query [T, Hq, W], latent_cache [num_blocks, block_size, X], slots [T, K] int64 -> [T, Hq, rank], dtype of query.
    """
    out = query.new_empty(*query.shape[:2], rank)
    for token, own in enumerate(slots.tolist()):
        seen = _entries(latent_cache, own, rank)
        scores = torch.softmax(query[token].double() @ seen.T * scale, dim=-1)
        out[token] = (scores @ seen[:, :rank]).to(query.dtype)
    return out


@op
def sparse_latent_attention_with_lse(
    query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """`sparse_latent_attention`, and the log-sum-exp of each head's scores, by which `merge_attention_states` joins it
    with scores of other things, such as sinks.

    query [T, Hq, W], latent_cache [num_blocks, block_size, X], slots [T, K] int64 -> [T, Hq, rank] float32 and
    [T, Hq] float32."""
    out, lse = query.new_empty(*query.shape[:2], rank).float(), query.new_empty(query.shape[:2]).float()
    for token, own in enumerate(slots.tolist()):
        seen = _entries(latent_cache, own, rank)
        scores = query[token].double() @ seen.T * scale
        lse[token] = torch.logsumexp(scores, dim=-1)
        out[token] = (torch.softmax(scores, dim=-1) @ seen[:, :rank]).float()
    return out, lse


def _entries(latent_cache: Tensor, slots: list[int], rank: int) -> Tensor:
    """[L, W] float64: the entries in those of the slots that are not -1."""
    rows = [latent_cache[divmod(slot, latent_cache.shape[1])] for slot in slots if slot >= 0]
    return torch.stack([decode_latent_row(row, rank) for row in rows])


def tokens_of(layout: PagedLayout) -> Iterator[tuple[int, int, list[int]]]:
    """Each token of the step: its number, its position, and the blocks of its sequence."""
    token = 0
    for blocks, query_len, kv_len in zip(layout.block_table.tolist(), layout.query_lens, layout.kv_lens, strict=True):
        for position in range(kv_len - query_len, kv_len):
            yield token, position, blocks
            token += 1


@torch_backend_for(index_topk)
def torch_index_topk(query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout, *, k: int) -> Tensor:
    """Sequence by sequence."""
    k = min(k, max(layout.kv_lens))
    out = torch.full((len(query), k), -1, device=query.device)
    block_size = key_cache.shape[1]
    for seq in sequences_of(layout):
        keys = key_cache[seq.slots // block_size, seq.slots % block_size].float()  # [L, D]
        length = min(k, seq.kv_len)
        rows = max(1, WORKSPACE // (query.shape[1] * seq.kv_len))
        for begin in range(seq.query_begin, seq.query_begin + seq.query_len, rows):
            part = slice(begin, min(begin + rows, seq.query_begin + seq.query_len))
            products = torch.relu(query[part].float() @ keys.T)  # [n, Hi, L]
            scores = (weights[part, None] @ products)[:, 0]
            first = seq.kv_len - seq.query_len + begin - seq.query_begin  # position of the first token
            later = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu(first + 1)
            best, positions = scores.masked_fill_(later, -torch.inf).topk(length, dim=-1)
            out[part, :length] = positions.masked_fill(best == -torch.inf, -1)
    return out


@torch_backend_for(pooled_index_topk)
def _torch_pooled_index_topk(
    query: Tensor, weights: Tensor, state_cache: Tensor, position_bias: Tensor, layout: PagedLayout, *, k: int
) -> Tensor:
    """Sequence by sequence."""
    pool, size = position_bias.shape
    columns = min(k * pool + pool - 1, max(layout.kv_lens))
    out = torch.full((len(query), columns), -1, device=query.device)
    block_size, places = state_cache.shape[1], torch.arange(pool, device=query.device)
    for seq in sequences_of(layout):
        whole = seq.kv_len // pool
        slots = seq.slots[: whole * pool]
        states = state_cache[slots // block_size, slots % block_size].float().unflatten(0, (whole, pool))
        keys = (torch.softmax(states[..., size:] + position_bias, dim=1) * states[..., :size]).sum(dim=1)
        ends = torch.arange(1, whole + 1, device=query.device) * pool
        rows = max(1, WORKSPACE // (query.shape[1] * seq.kv_len))
        for begin in range(seq.query_begin, seq.query_begin + seq.query_len, rows):
            part = slice(begin, min(begin + rows, seq.query_begin + seq.query_len))
            first = seq.kv_len - seq.query_len + begin - seq.query_begin  # position of the first token
            seen = first + 1 + torch.arange(part.stop - part.start, device=query.device)[:, None]
            products = torch.relu(query[part].float() @ keys.T)  # [n, Hi, pools]
            scores = (weights[part, None] @ products)[:, 0].masked_fill_(ends > seen, -torch.inf)
            best, pools = scores.topk(min(k, whole), dim=-1)
            members = (pools[..., None] * pool + places).masked_fill_((best == -torch.inf)[..., None], -1)
            tail = seen // pool * pool + places[:-1]
            found = torch.cat((members.flatten(1), tail.masked_fill_(tail >= seen, -1)), dim=-1)
            found = found.sort(dim=-1, descending=True).values[:, :columns]
            out[part, : found.shape[1]] = found
    return out


@torch_backend_for(position_slots)
def _torch_position_slots(positions: Tensor, layout: PagedLayout) -> Tensor:
    rows: Tensor | None = layout.derived.get("sequence of token")
    if rows is None:
        numbers = [row for row, count in enumerate(layout.query_lens) for _ in range(count)]
        rows = layout.derived["sequence of token"] = to_device(numbers, layout.block_table.device)
    size = layout.block_size
    blocks = layout.block_table[rows[:, None], positions.clamp_min(0) // size].long()
    return torch.where(positions < 0, -1, blocks * size + positions % size)


@torch_backend_for(sparse_latent_attention)
def torch_sparse_latent_attention(
    query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int
) -> Tensor:
    """The entries of a few tokens are gathered at a time."""
    out = query.new_empty(*query.shape[:2], rank)
    for part, rows, scores in _scored(query, latent_cache, slots, scale, rank):
        out[part] = torch.softmax(scores, dim=-1).to(query.dtype) @ rows[..., :rank]
    return out


@torch_backend_for(sparse_latent_attention_with_lse)
def _torch_sparse_latent_attention_with_lse(
    query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:2], rank, dtype=torch.float32)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    for part, rows, scores in _scored(query, latent_cache, slots, scale, rank):
        lse[part] = torch.logsumexp(scores, dim=-1)
        out[part] = torch.softmax(scores, dim=-1) @ rows[..., :rank].float()
    return out, lse


def _scored(
    query: Tensor, latent_cache: Tensor, slots: Tensor, scale: float, rank: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """A few tokens at a time: which they are, their entries [n, K, W], and scores [n, Hq, K] float32, -inf where there
    is no entry."""
    block_size = latent_cache.shape[1]
    unused = slots < 0
    slots = torch.where(unused, slots[:, :1], slots)  # whatever else is there is not read
    tokens = max(1, WORKSPACE // (slots.shape[1] * query.shape[2]))
    for begin in range(0, len(query), tokens):
        part = slice(begin, begin + tokens)
        rows = decode_latents(latent_cache[slots[part] // block_size, slots[part] % block_size], query.dtype, rank)
        scores = (query[part] @ rows.transpose(1, 2)).float() * scale
        yield part, rows, scores.masked_fill_(unused[part, None], -torch.inf)


def sequences_of(layout: PagedLayout) -> list[PrefillSequence]:
    """Every sequence of the step and the slots of its tokens; worked out once per step."""
    sequences: list[PrefillSequence] | None = layout.derived.get("torch index")
    if sequences is None:
        plan = AttentionPlan(layout=layout, sliding_window=None, prefills=[], decodes=[], decode_order=None)
        sequences = layout.derived["torch index"] = list(plan.all_sequences())
    return sequences
