"""Rows of latents in fp8: the layout that DeepSeek published with V3.2, vLLM's `fp8_ds_mla`.

A row is one token's entry x of W numbers, R of them the latent, as bytes:
- R float8_e4m3fn: the latent in groups of 128, the last of which may have fewer; each number is x / s, rounded to
  nearest even.
- a float32 s for each group: a / 448 with a = max |x| of the group and 448 the largest number of the format, but at
  least the smallest normal float32 (1.2e-38), so that a group of zeros divides. A NaN in a group makes its s NaN.
- W - R bfloat16, rounded to nearest even: the rotated key, and what else a network keeps of a token.
Quotients are computed in float32. R = 512, W = 576 gives 512 + 16 + 128 = 656 bytes, as in FlashMLA's kernels
(DeepSeek-AI 2025) and vLLM's `concat_and_cache_ds_mla`.

Shape legend: ... any leading dimensions; W numbers of an entry, R of its latent, G groups of it, X bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces.kv_cache import FP8_DS_MLA, LATENT_GROUP, latent_row_bytes

__all__ = [
    "decode_latent_row",
    "decode_latents",
    "encode_latent_row",
    "encode_latents",
    "latent_width",
    "split_latent_cache",
]

CODES = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = torch.finfo(torch.float32).tiny


def latent_width(latent_cache: Tensor, rank: int) -> int:
    """Numbers of an entry of a cache [..., X].

    Args:
        latent_cache: Its dtype tells the format: rows of this layout are uint8.
        rank: R.
    """
    size = latent_cache.shape[-1]
    return size if latent_cache.dtype != torch.uint8 else rank + (size - rank - 4 * -(-rank // LATENT_GROUP)) // 2


def split_latent_cache(cache: Tensor, width: int, rank: int) -> tuple[Tensor, Tensor]:
    """The cache of entries of `width` numbers, and that of what rows have behind them, both views.

    Args:
        cache: [num_blocks, block_size, X], of the rows together.
        width: W of the entries alone.
        rank: R.

    Returns:
        A cache as `cache` is, and one of floats: bfloat16 where rows are of this layout.
    """
    if cache.dtype != torch.uint8:
        return cache[..., :width], cache[..., width:]
    end = latent_row_bytes(FP8_DS_MLA, width, rank)
    return cache[..., :end], cache[..., end:].view(torch.bfloat16)


def encode_latents(x: Tensor, rank: int) -> Tensor:
    """Entries as the cache keeps them: [..., W] floats -> [..., X] uint8."""
    groups = [part.float() for part in x[..., :rank].split(LATENT_GROUP, dim=-1)]
    largest = torch.stack([part.abs().amax(dim=-1) for part in groups], dim=-1)  # [..., G]
    # A tensor over a number would be rounded twice: torch multiplies it with the reciprocal.
    scales = torch.maximum(largest / torch.full_like(largest, LARGEST), torch.full_like(largest, LEAST_SCALE))
    codes = [
        (part / scale).clamp(-LARGEST, LARGEST).to(CODES)
        for part, scale in zip(groups, scales.split(1, dim=-1), strict=True)
    ]
    rest = x[..., rank:].to(torch.bfloat16).contiguous()
    return torch.cat([*(part.view(torch.uint8) for part in codes), _bytes(scales), _bytes(rest)], dim=-1)


def decode_latents(rows: Tensor, dtype: torch.dtype, rank: int) -> Tensor:
    """What rows of a cache stand for: [..., X] of the cache's dtype -> [..., W] of `dtype`."""
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    scales_end = rank + 4 * -(-rank // LATENT_GROUP)
    latent = rows[..., :rank].view(CODES).float()
    scales = rows[..., rank:scales_end].contiguous().view(torch.float32)
    scales = scales.repeat_interleave(LATENT_GROUP, dim=-1)[..., :rank]
    rest = rows[..., scales_end:].contiguous().view(torch.bfloat16)
    return torch.cat(((latent * scales).to(dtype), rest.to(dtype)), dim=-1)


def encode_latent_row(x: Tensor, rank: int) -> Tensor:
    """One entry [W] -> its row [X], in the plain form that references have."""
    codes, scales = [], []
    for begin in range(0, rank, LATENT_GROUP):
        group = x[begin : min(begin + LATENT_GROUP, rank)].float()
        scale = torch.maximum(group.abs().max().div(torch.tensor(LARGEST)), torch.tensor(LEAST_SCALE))
        codes.append(torch.clamp(group / scale, -LARGEST, LARGEST).to(CODES).view(torch.uint8))
        scales.append(scale[None])
    rest = x[rank:].to(torch.bfloat16).clone()
    return torch.cat([*codes, torch.cat(scales).view(torch.uint8), rest.view(torch.uint8)])


def decode_latent_row(row: Tensor, rank: int) -> Tensor:
    """A row [X] of a cache in any format -> its entry [W] float64."""
    if row.dtype != torch.uint8:
        return row.double()
    groups = -(-rank // LATENT_GROUP)
    scales = row[rank : rank + 4 * groups].clone().view(torch.float32).double()
    latent = [
        row[begin : min(begin + LATENT_GROUP, rank)].view(CODES).double() * scales[begin // LATENT_GROUP]
        for begin in range(0, rank, LATENT_GROUP)
    ]
    return torch.cat([*latent, row[rank + 4 * groups :].clone().view(torch.bfloat16).double()])


def _bytes(x: Tensor) -> Tensor:
    """[..., N] without gaps -> its bytes [..., N * itemsize], none where N is 0."""
    return x.view(torch.uint8)
