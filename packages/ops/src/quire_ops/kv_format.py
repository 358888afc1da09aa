"""The formats that rows of a paged cache come in: which dtype a tensor of each has, and what torch makes of its rows.

A row is one token's key or value of one head. What a format means is declared in `kv_cache_ops.py`; the slow, plain
form of the same is in `kv_reference.py`.

Shape legend: ... any leading dimensions, the last of them key-value heads where a scale by head applies; D head
dimension; C elements of a row's codes; X elements that a row takes in the cache, C and its scale's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CACHE_TORCH_DTYPES", "QUANTIZED", "SCALE_BYTES", "Rows", "decode_rows", "encode_rows", "rows_of"]

CACHE_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8_ds_mla": torch.uint8,
}
"""A name of `quire_interfaces.KV_CACHE_DTYPES` or `LATENT_CACHE_DTYPES` -> dtype of the cache's tensor; each dtype
stands for one format of keys and values, and for one of latents."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED = frozenset({*FP8, torch.int8, torch.uint8})
"""Dtypes of caches of fewer bits than networks compute in."""
SCALE_BYTES = 4
"""Of a row of an int8 or int4 cache."""
INT4_ZERO = 8

Rows = tuple[Tensor] | tuple[Tensor, Tensor]
"""Codes [..., C] of the cache's dtype; of int8 and int4 also float32 scales, as bytes [..., 4] of that dtype."""


def rows_of(kv_cache: Tensor) -> Rows:
    """The rows of a cache [..., block_size, X] whose last two dimensions are contiguous: views of its memory, codes
    [..., block_size, C] and scales [..., block_size, 4] if it has such."""
    if kv_cache.dtype not in (torch.int8, torch.uint8):
        return (kv_cache,)
    block_size, row_size = kv_cache.shape[-2:]
    sizes = [block_size * (row_size - SCALE_BYTES), block_size * SCALE_BYTES]
    codes, scales = kv_cache.view(*kv_cache.shape[:-2], -1).split(sizes, dim=-1)
    return codes.unflatten(-1, (block_size, -1)), scales.unflatten(-1, (block_size, -1))


def encode_rows(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Rows:
    """Rows as the cache keeps them.

    Args:
        x: [..., D], of the compute dtype.
        dtype: Of the cache.
        scale: float32, to be broadcast against x: what fp8 numbers are multiples of. None for 1; ignored by others.

    Returns:
        Codes, and scales where the format has them.
    """
    if dtype in FP8:
        wide = x.float() if scale is None else x.float() / scale
        limit = torch.finfo(dtype).max
        return (wide.clamp(-limit, limit).to(dtype),)
    if dtype == torch.int8:
        codes, row_scale = _integers(x, 127)
        return codes.to(torch.int8), row_scale.view(torch.int8)
    if dtype == torch.uint8:
        codes, row_scale = _integers(x, 7)
        low, high = (codes + INT4_ZERO).to(torch.uint8).chunk(2, dim=-1)
        return low | high << 4, row_scale.view(torch.uint8)
    return (x.to(dtype),)


def decode_rows(rows: Sequence[Tensor], dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """What rows of a cache stand for.

    Args:
        rows: Codes, and scales where the format has them.
        dtype: Of the result.
        scale: As in `encode_rows`.

    Returns:
        [..., D] of `dtype`.
    """
    stored, *row_scale = rows
    if stored.dtype in FP8 and scale is not None:
        return stored.float().mul_(scale).to(dtype)
    if not row_scale:
        return stored.to(dtype)
    if stored.dtype == torch.uint8:
        stored = torch.cat((stored & 15, stored >> 4), dim=-1).float().sub_(INT4_ZERO)
    return (stored.float() * row_scale[0].contiguous().view(torch.float32)).to(dtype)


def _integers(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """x [..., D] -> whole numbers of at most `limit` [..., D], and the scale of each row [..., 1]; float32 both.

    A row of zeros has no inverse, nor has one so small that its inverse overflows: both become zeros.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    # A number over a tensor would be rounded twice: torch multiplies it with the reciprocal.
    inverse = torch.full_like(largest, limit) / largest
    inverse = torch.where(torch.isfinite(inverse), inverse, 0.0)
    return torch.round(wide * inverse).nan_to_num_(0.0), largest / limit
