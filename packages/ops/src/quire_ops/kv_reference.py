"""One row of a paged cache, as op `write_kv_cache` keeps it and as op `paged_attention` reads it: the plain form.

A row is one token's key or value of one head, [D] numbers. Whatever rounds is done in float32, so that every backend
can keep the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode_row", "encode_row", "read_row", "write_row"]


def write_row(tokens: Tensor, offset: int, row: Tensor) -> None:
    """Put a row [X] of one token where the cache has it. tokens: [block_size, X], what a head has in a block."""
    if tokens.dtype not in (torch.int8, torch.uint8):
        tokens[offset] = row
        return
    memory, block_size, num_codes = tokens.view(-1), len(tokens), len(row) - 4
    memory[offset * num_codes :][:num_codes] = row[:-4]
    memory[block_size * num_codes + offset * 4 :][:4] = row[-4:]


def read_row(tokens: Tensor, offset: int) -> Tensor:
    """The row [X] of one token, from where `write_row` puts it."""
    if tokens.dtype not in (torch.int8, torch.uint8):
        return tokens[offset]
    memory, (block_size, row_size) = tokens.view(-1), tokens.shape
    num_codes = row_size - 4
    codes, scale = memory[offset * num_codes :][:num_codes], memory[block_size * num_codes + offset * 4 :][:4]
    return torch.cat([codes, scale])


def encode_row(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x [D] -> the row [X], in the dtype of the cache: codes, then of int8 and int4 the scale. scale: of fp8."""
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        return torch.clamp(x.float() / scale, -largest, largest).to(dtype)
    if dtype == torch.int8:
        codes, row_scale = _whole_numbers(x, limit=127.0)
        return torch.cat([codes.to(torch.int8), row_scale.view(torch.int8)])
    if dtype == torch.uint8:
        codes, row_scale = _whole_numbers(x, limit=7.0)
        half = len(x) // 2
        shifted = [int(code) + 8 for code in codes]
        packed = [low + 16 * high for low, high in zip(shifted[:half], shifted[half:], strict=True)]
        return torch.cat([torch.tensor(packed, dtype=torch.uint8), row_scale.view(torch.uint8)])
    return x.to(dtype)


def decode_row(row: Tensor, scale: float) -> Tensor:
    """The row [X] -> [D] float64."""
    if row.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return row.double() * scale
    if row.dtype == torch.int8:
        return row[:-4].double() * _row_scale(row)
    if row.dtype == torch.uint8:
        packed = row[:-4].tolist()
        codes = [byte % 16 - 8 for byte in packed] + [byte // 16 - 8 for byte in packed]
        return torch.tensor(codes, dtype=torch.float64) * _row_scale(row)
    return row.double()


def _whole_numbers(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """x [D] -> whole numbers up to `limit` [D], and what they are multiples of [1], both float32."""
    wide = x.float()
    largest = wide.abs().max()
    # A number over a tensor would be rounded twice: torch multiplies it with the reciprocal.
    inverse = torch.full_like(largest, limit) / largest
    if not torch.isfinite(inverse):  # nothing but zeros, or too little to tell from them
        inverse = torch.zeros(())
    codes = torch.round(wide * inverse)  # halves go to the even neighbour
    return torch.where(torch.isnan(codes), 0.0, codes), (largest / limit)[None]


def _row_scale(row: Tensor) -> float:
    return float(row[-4:].clone().view(torch.float32))
