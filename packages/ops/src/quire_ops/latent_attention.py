"""Multi-head latent attention over a paged cache (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1.2).

With the projections absorbed into queries and outputs it is attention with one key-value head, whose value is the
beginning of its key: every token's entry is read once for all heads.

Shape legend: T tokens, Hq query heads, W numbers of a cache entry, X elements of its row in the cache, L tokens seen.

Rows of a floating-point cache are the entries themselves, X = W; those of a uint8 cache are bytes of the layout in
`latent_format.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.attention_ops import visible_places
from quire_ops.attention_plan import AttentionPlan, make_plan
from quire_ops.latent_format import decode_latent_row, decode_latents, encode_latent_row, encode_latents
from quire_ops.layout import PagedLayout
from quire_ops.op import op
from quire_ops.table import torch_backend_for
from quire_ops.torch_attention import attend

__all__ = ["latent_attention", "torch_latent_attention", "torch_write_latent_cache", "write_latent_cache"]


@op
def write_latent_cache(entries: Tensor, latent_cache: Tensor, slot_mapping: Tensor, rank: int = 0) -> None:
    """Write the entry of token t into slot `slot_mapping[t]`, in the format of the cache, where an entry's first `rank`
    numbers are the latent; entries [T, W], latent_cache [num_blocks, block_size, X], slot_mapping [T] int64."""
    is_fp8 = latent_cache.dtype == torch.uint8
    for token, slot in enumerate(slot_mapping.tolist()):
        row = encode_latent_row(entries[token], rank) if is_fp8 else entries[token]
        latent_cache[divmod(slot, latent_cache.shape[1])] = row


@op(trees=True)
def latent_attention(query: Tensor, latent_cache: Tensor, layout: PagedLayout, *, scale: float, rank: int) -> Tensor:
    """Causal softmax attention of this step's tokens over the entries of their own sequence, which all heads share: an
    entry is the key, and its first `rank` numbers, the latent, are the value. Slots that no token of the step may see
    are never read. Entries may be the beginnings of longer ones.

    query [T, Hq, W], latent_cache [num_blocks, block_size, X] -> [T, Hq, rank], dtype of query.
    """
    out = query.new_empty(*query.shape[:2], rank)
    block_size, token = latent_cache.shape[1], 0
    for blocks, query_len, kv_len in zip(layout.block_table.tolist(), layout.query_lens, layout.kv_lens, strict=True):
        rows = [latent_cache[blocks[place // block_size], place % block_size] for place in range(kv_len)]
        entries = [decode_latent_row(row, rank) for row in rows]
        for place in range(kv_len - query_len, kv_len):
            seen = torch.stack([entries[p] for p in visible_places(layout, token, place)])  # [L, W]
            weights = torch.softmax(query[token].double() @ seen.T * scale, dim=-1)
            out[token] = (weights @ seen[:, :rank]).to(query.dtype)
            token += 1
    return out


@torch_backend_for(write_latent_cache)
def torch_write_latent_cache(entries: Tensor, latent_cache: Tensor, slot_mapping: Tensor, rank: int = 0) -> None:
    block_size, dtype = latent_cache.shape[1], latent_cache.dtype
    rows = encode_latents(entries, rank) if dtype == torch.uint8 else entries.to(dtype)
    latent_cache[slot_mapping // block_size, slot_mapping % block_size] = rows


@torch_backend_for(latent_attention, trees=True)
def torch_latent_attention(
    query: Tensor, latent_cache: Tensor, layout: PagedLayout, *, scale: float, rank: int
) -> Tensor:
    """Through `torch_attention.attend`; the gathered entries serve as keys and values."""
    plan: AttentionPlan | None = layout.derived.get("torch latent")
    if plan is None:
        token_bytes = query.shape[2] * query.itemsize
        plan = layout.derived["torch latent"] = make_plan(layout, token_bytes, query.dtype, None)
    block_size = latent_cache.shape[1]

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = decode_latents(latent_cache[slots // block_size, slots % block_size], query.dtype, rank)[:, None]
        return rows, rows  # torch's fused operator wants values as wide as keys: what is too much is cut off

    return attend(query, gather, plan, scale)[..., :rank]
