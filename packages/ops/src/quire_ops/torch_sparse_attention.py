"""Sparse latent attention through torch: which tokens to attend to, where they are, and attention over these alone.
Shapes and dtypes are in `declarations.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.attention_plan import AttentionPlan, PrefillSequence
from quire_ops.layout import PagedLayout
from quire_ops.staging import to_device

__all__ = ["index_topk", "position_slots", "sparse_latent_attention"]

WORKSPACE = 1 << 22
"""Numbers that are held at once for the tokens of one call."""


def index_topk(query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout, *, k: int) -> Tensor:
    """Op `index_topk`, sequence by sequence."""
    k = min(k, max(layout.kv_lens))
    out = torch.full((len(query), k), -1, device=query.device)
    block_size = key_cache.shape[1]
    for seq in _sequences(layout):
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


def position_slots(positions: Tensor, layout: PagedLayout) -> Tensor:
    """Op `position_slots`."""
    rows: Tensor | None = layout.derived.get("sequence of token")
    if rows is None:
        numbers = [row for row, count in enumerate(layout.query_lens) for _ in range(count)]
        rows = layout.derived["sequence of token"] = to_device(numbers, layout.block_table.device)
    size = layout.block_size
    blocks = layout.block_table[rows[:, None], positions.clamp_min(0) // size].long()
    return torch.where(positions < 0, -1, blocks * size + positions % size)


def sparse_latent_attention(query: Tensor, latent_cache: Tensor, slots: Tensor, *, scale: float, rank: int) -> Tensor:
    """Op `sparse_latent_attention`: the rows of a few tokens are gathered at a time."""
    block_size, out = latent_cache.shape[1], query.new_empty(*query.shape[:2], rank)
    unused = slots < 0
    slots = torch.where(unused, slots[:, :1], slots)  # whatever else is there is not read
    tokens = max(1, WORKSPACE // (slots.shape[1] * query.shape[2]))
    for begin in range(0, len(query), tokens):
        part = slice(begin, begin + tokens)
        rows = latent_cache[slots[part] // block_size, slots[part] % block_size]  # [n, K, W]
        scores = (query[part] @ rows.transpose(1, 2)).float() * scale  # [n, Hq, K]
        shares = torch.softmax(scores.masked_fill_(unused[part, None], -torch.inf), dim=-1)
        out[part] = shares.to(query.dtype) @ rows[..., :rank]
    return out


def _sequences(layout: PagedLayout) -> list[PrefillSequence]:
    """Every sequence of the step and the slots of its tokens; worked out once per step."""
    found: list[PrefillSequence] | None = layout.derived.get("torch index")
    if found is None:
        plan = AttentionPlan(layout=layout, sliding_window=None, prefills=[], decodes=[], decode_order=None)
        found = layout.derived["torch index"] = list(plan.all_sequences())
    return found
