"""Op `paged_attention` with torch's scaled-dot-product attention for prompts, and our kernel for decodes.

torch takes what it has for the GPU: FlashAttention's kernels or cuDNN's. Keys and values of a prompt are gathered
from their blocks first; decodes, which would pay for that in every step, read them where they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_interfaces import FEW_TOKENS
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.triton import attention
from quire_ops import PagedLayout, implements, ops, torch_attention
from quire_ops.staging import to_device

__all__ = ["paged_attention"]


@implements(ops.paged_attention)
def paged_attention(
    query: Tensor, kv_cache: Tensor, layout: PagedLayout, *, platform: Platform = NVIDIA, **options: Any
) -> Tensor:
    """Platform: whose GPUs it runs on."""
    prompts, decodes = _parts(layout)
    if prompts is None:
        return attention.paged_attention(query, kv_cache, layout, platform=platform, **options)
    if decodes is None:
        return torch_attention.paged_attention(query, kv_cache, layout, **options)
    out = torch.empty_like(query)
    attended = torch_attention.paged_attention(query[prompts.tokens], kv_cache, prompts.layout, **options)
    out.index_copy_(0, prompts.tokens, attended)
    attended = attention.paged_attention(query[decodes.tokens], kv_cache, decodes.layout, platform=platform, **options)
    return out.index_copy_(0, decodes.tokens, attended)


class _Part(NamedTuple):
    """Some sequences of a step."""

    tokens: Tensor
    """int64: their rows of the query."""
    layout: PagedLayout


def _parts(layout: PagedLayout) -> tuple[_Part | None, _Part | None]:
    """(prompts, decodes), each None where there are none. Worked out for the first layer of a step."""
    parts: tuple[_Part | None, _Part | None] | None = layout.derived.get("sdpa")
    if parts is None:
        is_long = [query_len > FEW_TOKENS for query_len in layout.query_lens]
        parts = layout.derived["sdpa"] = _part(layout, is_long), _part(layout, [not long for long in is_long])
    return parts


def _part(layout: PagedLayout, chosen: list[bool]) -> _Part | None:
    rows = [row for row, is_chosen in enumerate(chosen) if is_chosen]
    if not rows:
        return None
    starts, tokens = [0], list[int]()
    begin = 0
    for query_len, is_chosen in zip(layout.query_lens, chosen, strict=True):
        if is_chosen:
            tokens += range(begin, begin + query_len)
            starts.append(starts[-1] + query_len)
        begin += query_len
    device = layout.block_table.device
    on_device, places = to_device(rows, device), to_device(tokens, device)
    own = PagedLayout(
        query_start_loc=to_device(starts, device).int(),
        seq_lens=layout.seq_lens[on_device],
        block_table=layout.block_table[on_device],
        slot_mapping=layout.slot_mapping[places],
        block_size=layout.block_size,
        query_lens=[layout.query_lens[row] for row in rows],
        kv_lens=[layout.kv_lens[row] for row in rows],
    )
    return _Part(places, own)
