"""Op `paged_attention` by FlashAttention 2 (Dao, 2023), package `flash-attn` from 2.6 on.

It reads our cache where it is, as views of another order of dimensions; its blocks are multiples of 256 tokens. Written
to its documentation; it has not run on a GPU in this project.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire_ops import PagedLayout, implements, ops

__all__ = ["arguments", "paged_attention"]


@implements(ops.paged_attention)
def paged_attention(query: Tensor, kv_cache: Tensor, layout: PagedLayout, **options: Any) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(**arguments(query, kv_cache, layout, **options))
    return out


def arguments(
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
) -> dict[str, Any]:
    """What `flash_attn_varlen_func` is called with.

    Its causal mask ends at the lower right corner, as a step's tokens are the last of their sequences. A window counts
    the tokens before a token, without itself.
    """
    starts = layout.derived.get("flash-attn")
    if starts is None:
        starts = torch.zeros(len(layout.kv_lens) + 1, dtype=torch.int32, device=query.device)
        torch.cumsum(layout.seq_lens, 0, dtype=torch.int32, out=starts[1:])
        layout.derived["flash-attn"] = starts
    return {
        "q": query,
        "k": kv_cache[:, 0].transpose(1, 2),  # [blocks, tokens of a block, Hkv, D]
        "v": kv_cache[:, 1].transpose(1, 2),
        "cu_seqlens_q": layout.query_start_loc,
        "cu_seqlens_k": starts,
        "max_seqlen_q": max(layout.query_lens),
        "max_seqlen_k": max(layout.kv_lens),
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "softcap": soft_cap or 0.0,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.float(),
        "block_table": layout.block_table,
    }
