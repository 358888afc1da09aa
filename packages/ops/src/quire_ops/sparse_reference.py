"""What the ops of sparse latent attention compute, one token at a time in float64. Shapes are in `declarations.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire_ops.layout import PagedLayout

__all__ = ["index_topk", "position_slots", "sparse_latent_attention"]


def index_topk(query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout, *, k: int) -> Tensor:
    """Op `index_topk`."""
    out = torch.full((len(query), min(k, max(layout.kv_lens))), -1, device=query.device)
    for token, position, blocks in _tokens(layout):
        slots = [(blocks[seen // layout.block_size], seen % layout.block_size) for seen in range(position + 1)]
        keys = torch.stack([key_cache[slot] for slot in slots]).double()  # [L, D]
        scores = weights[token].double() @ torch.relu(query[token].double() @ keys.T)
        best = torch.sort(scores, descending=True, stable=True).indices[: out.shape[1]]
        out[token, : len(best)] = best
    return out


def position_slots(positions: Tensor, layout: PagedLayout) -> Tensor:
    """Op `position_slots`."""
    out = torch.full_like(positions, -1)
    for token, _, blocks in _tokens(layout):
        for column, position in enumerate(positions[token].tolist()):
            if position >= 0:
                block, offset = divmod(position, layout.block_size)
                out[token, column] = blocks[block] * layout.block_size + offset
    return out


def sparse_latent_attention(query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int) -> Tensor:
    """Op `sparse_latent_attention`."""
    out = query.new_empty(*query.shape[:2], rank)
    for token, row in enumerate(slots.tolist()):
        seen = torch.stack([latent_cache[divmod(slot, latent_cache.shape[1])] for slot in row if slot >= 0]).double()
        scores = torch.softmax(query[token].double() @ seen.T * scale, dim=-1)
        out[token] = (scores @ seen[:, :rank]).to(query.dtype)
    return out


def _tokens(layout: PagedLayout) -> Iterator[tuple[int, int, list[int]]]:
    """Each token of the step: its number, its position, and the blocks of its sequence."""
    token = 0
    for blocks, query_len, kv_len in zip(layout.block_table.tolist(), layout.query_lens, layout.kv_lens, strict=True):
        for position in range(kv_len - query_len, kv_len):
            yield token, position, blocks
            token += 1
