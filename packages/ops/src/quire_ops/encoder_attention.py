"""Attention of encoders, over the step's own keys and values.

Shape legend: T tokens, Hq query heads, Hkv key-value heads, D head dimension, L tokens of a sequence, M furthest
distance that a bias tells apart.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["encoder_attention"]

QUERY_PIECE = 512
"""Queries per call where an explicit mask is needed: bounds the mask to [Hq, QUERY_PIECE, sequence]."""


@op
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    key_lens: list[int] | None = None,
    look_ahead: int | None = None,
) -> Tensor:
    """Softmax attention of every token over all tokens of its own sequence, in both directions; sequences of `lens`
    tokens follow each other.

    query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D] -> [T, Hq, D], dtype of query. scale: factor of the scores.
    window: tokens see those at most so many tokens away. look_ahead: tokens behind it that each sees; None for as many
    as before it. bias [Hq, 2 * M + 1]: bias[M + d] is added to the score of a key d tokens behind the query (before it
    if d is negative), and that of M from M tokens on.
    key_lens: tokens of each sequence, from its first, that all of its tokens see; None for all."""
    out = torch.empty_like(query)
    group_size = query.shape[1] // key.shape[1]
    before, after = _reach(window, look_ahead)
    begin = 0
    for length, key_len in zip(lens, lens if key_lens is None else key_lens, strict=True):
        for token in range(begin, begin + length):
            first = begin if before is None else max(begin, token - before)
            last = begin + key_len if after is None else min(begin + key_len, token + after + 1)
            seen = list(range(first, last))
            keys = key[seen].double().repeat_interleave(group_size, dim=1)  # [L, Hq, D]
            values = value[seen].double().repeat_interleave(group_size, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[token].double(), keys) * scale
            if bias is not None:
                most = bias.shape[1] // 2
                scores += bias.double()[:, [most + max(-most, min(other - token, most)) for other in seen]]
            out[token] = torch.einsum("hl,lhd->hd", torch.softmax(scores, dim=-1), values).to(query.dtype)
        begin += length
    return out


@torch_backend_for(encoder_attention)
def _torch_encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    key_lens: list[int] | None = None,
    look_ahead: int | None = None,
) -> Tensor:
    """A call for the sequences of one length that follow each other, or for each piece of them where there is a
    mask."""
    out = torch.empty_like(query)
    before, after = _reach(window, look_ahead)
    begin = 0
    for (length, key_len), group in groupby(zip(lens, lens if key_lens is None else key_lens, strict=True)):
        count = len(list(group))
        tokens = slice(begin, begin + count * length)
        begin = tokens.stop
        if not length:
            continue
        queries, keys, values = (
            part[tokens].unflatten(0, (count, length)).transpose(1, 2) for part in (query, key, value)
        )  # [count, H, L, D]
        keys, values = keys[:, :, :key_len], values[:, :, :key_len]
        attended = out[tokens].unflatten(0, (count, length))
        if bias is None and all(reach is None or reach >= length - 1 for reach in (before, after)):
            whole = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)
            attended.copy_(whole.transpose(1, 2))
            continue
        for first in range(0, length, QUERY_PIECE):
            piece = slice(first, min(first + QUERY_PIECE, length))
            last = key_len if after is None else min(key_len, piece.stop + after)
            seen = slice(0 if before is None else min(last, max(0, piece.start - before)), last)
            mask = _mask(piece, seen, query, before, after, bias)
            part = F.scaled_dot_product_attention(
                queries[:, :, piece], keys[:, :, seen], values[:, :, seen], attn_mask=mask, scale=scale, enable_gqa=True
            )
            attended[:, piece] = part.transpose(1, 2)
    return out


def _reach(window: int | None, look_ahead: int | None) -> tuple[int | None, int | None]:
    """Tokens before a token, and behind it, that it sees; None for all."""
    return window, window if look_ahead is None else look_ahead


def _mask(
    piece: slice, seen: slice, query: Tensor, before: int | None, after: int | None, bias: Tensor | None
) -> Tensor:
    """[1, 1 or Hq, queries of the piece, keys that some of them see]: what is added to the scores."""
    keys, queries = (torch.arange(each.start, each.stop, device=query.device) for each in (seen, piece))
    distance = keys - queries[:, None]
    if bias is None:
        mask = query.new_zeros(1, *distance.shape)
    else:
        furthest = bias.shape[1] // 2
        mask = bias.to(query.dtype)[:, distance.clamp(-furthest, furthest) + furthest]
    if before is not None:
        mask = mask.masked_fill(distance < -before, float("-inf"))
    if after is not None:
        mask = mask.masked_fill(distance > after, float("-inf"))
    return mask[None]
