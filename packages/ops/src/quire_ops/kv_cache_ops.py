"""The paged cache of keys and values, its formats, and the ops that rotate and write it.

Shape legend: T tokens, Hq query heads, Hkv key-value heads, D head dimension.

The paged cache of one layer is one tensor [num_blocks, 2, Hkv, block_size, X]: of each block the keys of a head, token
after token, then the next head's, then the values. Blocks come first, so layers of different shapes can share memory by
block id; a head's tokens of a block are one piece of memory, which kernels read in one run.

A key (or value) x of D numbers takes X elements, in the format that the dtype tells:
- a floating-point dtype: X = D, x itself.
- float8_e4m3fn, float8_e5m2: X = D, x / s rounded to nearest even, at most the largest finite number; it stands for
  stored * s. s is the layer's `kv_scale` [2, Hkv] float32, of keys and of values, per head; none means ones.
- int8: X = D + 4. With a = max |x|: D codes, x * (127 / a) rounded to nearest even, and s = a / 127 as the four bytes
  of a float32; it stands for codes * s.
- uint8 is int4: X = D / 2 + 4. As int8 with 7 for 127; byte i holds element i in its low half and element i + D/2 in
  its high half, 8 added to both.
Of int8 and int4, a head's tokens of a block have all their codes first, token after token, and behind them their
scales: rows of codes begin at multiples of their own length, so that GPUs load 16 bytes at a time. The last two
dimensions of the tensor are no more than the number of bytes; `quire_ops.kv_format.rows_of` finds the rows.
All of it is computed in float32. Where 127 / a (7 / a) is not finite, zeros are stored. A NaN in x makes s NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_ops.kv_format import encode_rows, rows_of
from quire_ops.kv_reference import encode_row, write_row
from quire_ops.norms import rms_norm
from quire_ops.op import op
from quire_ops.table import SizeRule, torch_backend_for

__all__ = [
    "kv_cache_shape",
    "rope_and_write_kv",
    "rotary_embedding",
    "torch_rotary_embedding",
    "torch_write_kv_cache",
    "write_kv_cache",
]


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, row_size: int) -> tuple[int, ...]:
    """Shape of the paged cache of one layer. row_size: elements of one token and head, X above."""
    return (num_blocks, 2, num_kv_heads, block_size, row_size)


@op
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head (Su et al. 2021, sec. 3.4.2, half-split order); x [T, H, D], cos and
    sin [T, 1, D] of x's dtype -> [T, H, D]. cos holds each cosine twice; sin holds the negated sines, then the
    sines."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].double(), x[..., half:].double()
    cosine, sine = cos[..., :half].double(), sin[..., half:].double()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


@op
def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Write key and value of token t into slot `slot_mapping[t]`, in the format of the cache.

    key [T, Hkv, D], value [T, Hkv, D], kv_cache [num_blocks, 2, Hkv, block_size, X], slot_mapping [T] int64 (block id *
    block_size + offset), kv_scale [2, Hkv] float32, of an fp8 cache."""
    num_kv_heads, block_size = kv_cache.shape[2:4]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        for head in range(num_kv_heads):
            for which, x in enumerate((key[token, head], value[token, head])):
                scale = 1.0 if kv_scale is None else float(kv_scale[which, head])
                write_row(kv_cache[block, which, head], offset, encode_row(x, kv_cache.dtype, scale))


@op
def rope_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scale: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What stands between projections and attention, in one: `rms_norm` of the heads where there are weights (and eps),
    `rotary_embedding` of queries and keys, `write_kv_cache`; each result is rounded to the compute dtype. Optional:
    where no backend has it, networks call the other ops.

    query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], cos [T, 1, D], sin [T, 1, D], kv_cache and slot_mapping and
    kv_scale as in `write_kv_cache`, query_norm [D], key_norm [D] -> the queries [T, Hq, D], dtype of query."""
    if query_norm is not None:
        query = rms_norm(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm(key, key_norm, eps)
    write_kv_cache(rotary_embedding(key, cos, sin), value, kv_cache, slot_mapping, kv_scale)
    return rotary_embedding(query, cos, sin)


@torch_backend_for(rotary_embedding, sizes={"head_dim": SizeRule(minimum=2, multiple_of=2)})
def torch_rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With the signs already in `sin`, the rotation is one roll by half a head. Products and sum are rounded one by
    one: torch's `addcmul` rounds once or twice, as the number of tokens has it."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)


@torch_backend_for(write_kv_cache)
def torch_write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """One scatter, or two where rows have scales."""
    block_size = kv_cache.shape[3]
    scale = None if kv_scale is None else kv_scale[..., None]
    pairs = encode_rows(torch.stack((key, value), dim=1), kv_cache.dtype, scale)  # [T, 2, Hkv, ...]
    for places, part in zip(rows_of(kv_cache), pairs, strict=True):
        places[slot_mapping // block_size, :, :, slot_mapping % block_size] = part
