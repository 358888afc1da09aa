"""Multi-head latent attention over a paged cache through torch. Shapes and dtypes are in `declarations.py`.

With the projections absorbed into queries and outputs it is attention with one key-value head, whose value is the
beginning of its key: every token's row is read once for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.attention_plan import AttentionPlan, make_plan
from quire_ops.declarations import PagedLayout
from quire_ops.torch_attention import attend

__all__ = ["head_linear", "latent_attention", "write_latent_cache"]


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Op `head_linear`; neither needs to be contiguous."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def write_latent_cache(row: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    """Op `write_latent_cache`."""
    block_size = latent_cache.shape[1]
    latent_cache[slot_mapping // block_size, slot_mapping % block_size] = row


def latent_attention(query: Tensor, latent_cache: Tensor, layout: PagedLayout, *, scale: float, rank: int) -> Tensor:
    """Op `latent_attention`."""
    plan: AttentionPlan | None = layout.derived.get("torch latent")
    if plan is None:
        token_bytes = query.shape[2] * query.itemsize
        plan = layout.derived["torch latent"] = make_plan(layout, token_bytes, query.dtype, None)
    block_size = latent_cache.shape[1]

    def gather(slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = latent_cache[slots // block_size, slots % block_size][:, None]
        return rows, rows  # torch's fused operator wants values as wide as keys: what is too much is cut off

    return attend(query, gather, plan, scale)[..., :rank]
