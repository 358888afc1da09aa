"""Attention of encoders through torch. Shapes and dtypes are in `declarations.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["encoder_attention"]

QUERY_PIECE = 512
"""Queries per call where an explicit mask is needed: bounds the mask to [Hq, QUERY_PIECE, sequence]."""


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Op `encoder_attention`: a call for each sequence, or for each piece of one where there is a mask."""
    out = torch.empty_like(query)
    begin = 0
    for length in lens:
        rows = slice(begin, begin + length)
        queries, keys, values = (part[rows].transpose(0, 1)[None] for part in (query, key, value))  # [1, H, L, D]
        if bias is None and (window is None or window >= length - 1):
            attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1)
        else:
            for first in range(0, length, QUERY_PIECE):
                piece = slice(first, min(first + QUERY_PIECE, length))
                mask = _mask(piece, length, query, window, bias)
                attended = F.scaled_dot_product_attention(
                    queries[:, :, piece], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
                )
                out[begin + piece.start : begin + piece.stop] = attended[0].transpose(0, 1)
        begin += length
    return out


def _mask(piece: slice, length: int, query: Tensor, window: int | None, bias: Tensor | None) -> Tensor:
    """[1, 1 or Hq, queries of the piece, length]: what is added to the scores."""
    device = query.device
    distance = torch.arange(length, device=device) - torch.arange(piece.start, piece.stop, device=device)[:, None]
    if bias is None:
        mask = query.new_zeros(1, *distance.shape)
    else:
        furthest = bias.shape[1] // 2
        mask = bias.to(query.dtype)[:, distance.clamp(-furthest, furthest) + furthest]
    if window is not None:
        mask = mask.masked_fill(distance.abs() > window, float("-inf"))
    return mask[None]
