"""Rotation of queries and keys, and writing keys and values into the paged cache, apart and in one kernel.

A program takes a token and some of its heads. What is stored is rounded in float32 as `quire_ops.kv_cache_ops` says, so
that the bits in the cache are those of every other backend: without fused multiply-adds, which round once less.

Shape legend: T tokens, H heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = [
    "CACHE_FORMATS",
    "calls",
    "rope_and_write_kv",
    "rotary_embedding",
    "rotary_kernel",
    "rotate_and_write_kernel",
    "write_kv_cache",
    "write_kv_cache_kernel",
]

CACHE_FORMATS = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
    torch.uint8: "int4",
}
"""dtype of a quantized cache -> the kernels' name of its format; every other dtype is "plain"."""
_TILE = 1024


@triton.jit
def _whole(x):
    """x float32 -> the nearest whole number, halves to even; for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _codes(x, LIMIT: tl.constexpr):
    """x [H, D] float32 -> whole numbers up to LIMIT [H, D], and what they are multiples of [H]."""
    largest = tl.max(tl.abs(x), axis=1)
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    inverse = tl.div_rn(tl.full(largest.shape, LIMIT, tl.float32), largest)
    inverse = tl.where((inverse == inverse) & (inverse < float("inf")) & (~has_nan), inverse, 0.0)
    product = x * inverse[:, None]
    codes = tl.where(product == product, _whole(product), 0.0)
    scale = tl.div_rn(largest, tl.full(largest.shape, LIMIT, tl.float32))
    return codes, tl.where(has_nan, float("nan"), scale)


@triton.jit
def fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The bits of x float32, which is in range, as an 8-bit float, rounded to nearest even.

    By hand, because not every GPU converts to each of them.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    small = _whole(tl.abs(x) * (2.0 ** (BIAS - 1 + MANTISSA))).to(tl.int32)
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _store_row_scale(cache, places, scale, mask):
    """scale [H] float32 -> four bytes each, at `places` [H]."""
    bits = scale.to(tl.int32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(cache + places + byte, ((bits >> (8 * byte)) & 0xFF).to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _store_rows(
    cache, kv_scale, low, high, slot, which, heads, num_heads, block_size, cache_block,
    D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store rows whose first and second halves are low and high [H, HALF], of which D / 2 columns count.

    which: 0 for keys, 1 for values.
    """
    block, offset = slot // block_size, slot % block_size
    SCALE: tl.constexpr = 4 if FORMAT == "int8" or FORMAT == "int4" else 0
    first_rows = block * cache_block + (which * num_heads + heads) * block_size * ROW
    rows = first_rows + offset * (ROW - SCALE)
    scales = first_rows + block_size * (ROW - SCALE) + offset * SCALE
    col = tl.arange(0, HALF)
    mask = (heads < num_heads)[:, None] & (col < D // 2)[None, :]
    low, high = tl.where(mask, low, 0.0), tl.where(mask, high, 0.0)
    place = cache + rows[:, None] + col[None, :]
    if FORMAT == "int8" or FORMAT == "int4":
        both = tl.reshape(tl.join(low, high), (low.shape[0], 2 * HALF))  # in turn: their order does not matter here
        codes, scale = _codes(both, 127.0 if FORMAT == "int8" else 7.0)
        first, second = tl.split(tl.reshape(codes, (low.shape[0], HALF, 2)))
        if FORMAT == "int8":
            tl.store(place, first.to(tl.int8), mask=mask)
            tl.store(place + D // 2, second.to(tl.int8), mask=mask)
            _store_row_scale(cache, scales, scale, heads < num_heads)
        else:
            packed = (first + 8.0).to(tl.int32) | ((second + 8.0).to(tl.int32) << 4)
            tl.store(place, packed.to(tl.uint8), mask=mask)
            _store_row_scale(cache, scales, scale, heads < num_heads)
    else:
        if FORMAT == "e4m3" or FORMAT == "e5m2":
            limit: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
            if SCALED:
                divisor = tl.load(kv_scale + which * num_heads + heads, mask=heads < num_heads, other=1.0)
                divisor = tl.broadcast_to(divisor[:, None], low.shape)
                low, high = tl.div_rn(low, divisor), tl.div_rn(high, divisor)
            mantissa: tl.constexpr = 3 if FORMAT == "e4m3" else 2
            bias: tl.constexpr = 7 if FORMAT == "e4m3" else 15
            low = fp8_bits(tl.where(low == low, tl.minimum(tl.maximum(low, -limit), limit), low), mantissa, bias)
            high = fp8_bits(tl.where(high == high, tl.minimum(tl.maximum(high, -limit), limit), high), mantissa, bias)
        tl.store(place, low.to(cache.dtype.element_ty), mask=mask)
        tl.store(place + D // 2, high.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _load_halves(x, token, heads, num_heads, x_token, x_head, D: tl.constexpr, HALF: tl.constexpr):
    """The halves of some heads of a token: two times [H, HALF] float32."""
    col = tl.arange(0, HALF)
    mask = (heads < num_heads)[:, None] & (col < D // 2)[None, :]
    place = x + token * x_token + heads[:, None] * x_head + col[None, :]
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(place + D // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotated(low, high, cos, sin, token, angle_token, D: tl.constexpr, HALF: tl.constexpr):
    """cos holds each cosine twice, sin the negated sines and then the sines."""
    col = tl.arange(0, HALF)
    cosine = tl.load(cos + token * angle_token + col, mask=col < D // 2, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * angle_token + D // 2 + col, mask=col < D // 2, other=0.0).to(tl.float32)[None, :]
    return low * cosine - high * sine, high * cosine + low * sine


@triton.jit
def _store_halves(out, low, high, token, heads, num_heads, D: tl.constexpr, HALF: tl.constexpr):
    col = tl.arange(0, HALF)
    mask = (heads < num_heads)[:, None] & (col < D // 2)[None, :]
    place = out + (token * num_heads + heads)[:, None] * D + col[None, :]
    tl.store(place, low.to(out.dtype.element_ty), mask=mask)
    tl.store(place + D // 2, high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    x, cos, sin, out, num_heads, x_token, x_head, angle_token,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] = x rotated."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    low, high = _load_halves(x, token, heads, num_heads, x_token, x_head, D, HALF)
    low, high = _rotated(low, high, cos, sin, token, angle_token, D, HALF)
    _store_halves(out, low, high, token, heads, num_heads, D, HALF)


@triton.jit
def write_kv_cache_kernel(
    key, value, cache, kv_scale, slots, num_heads, block_size, cache_block,
    key_token, key_head, value_token, value_head,
    D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Keys and values of a token into its slot."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots + token)
    low, high = _load_halves(key, token, heads, num_heads, key_token, key_head, D, HALF)
    _store_rows(
        cache, kv_scale, low, high, slot, 0, heads, num_heads, block_size, cache_block, D, ROW, HALF, FORMAT, SCALED
    )
    low, high = _load_halves(value, token, heads, num_heads, value_token, value_head, D, HALF)
    _store_rows(
        cache, kv_scale, low, high, slot, 1, heads, num_heads, block_size, cache_block, D, ROW, HALF, FORMAT, SCALED
    )


@triton.jit
def _as_in(x, like):
    """x float32, rounded to the dtype of what `like` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _normed(low, high, weight, x, eps, D: tl.constexpr, HALF: tl.constexpr):
    """The heads, of the dtype of what x points to, after an RMS norm of each."""
    col = tl.arange(0, HALF)
    factor = (1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps))[:, None]
    first = tl.load(weight + col, mask=col < D // 2, other=0.0).to(tl.float32)[None, :]
    second = tl.load(weight + D // 2 + col, mask=col < D // 2, other=0.0).to(tl.float32)[None, :]
    return _as_in(low * factor * first, x), _as_in(high * factor * second, x)


@triton.jit
def rotate_and_write_kernel(
    query, key, value, cos, sin, query_norm, key_norm, out, cache, kv_scale, slots,
    num_heads, num_kv_heads, block_size, cache_block,
    query_token, query_head, key_token, key_head, value_token, value_head, eps,
    D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, FORMAT: tl.constexpr,
    SCALED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, D] = the queries normed and rotated; keys, likewise, and values into the token's slot.

    Grid: (T, pieces of the query heads, then pieces of the key-value heads).
    """
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    query_pieces = tl.cdiv(num_heads, HEADS)
    if piece < query_pieces:
        heads = piece * HEADS + tl.arange(0, HEADS)
        low, high = _load_halves(query, token, heads, num_heads, query_token, query_head, D, HALF)
        if NORMED:
            low, high = _normed(low, high, query_norm, query, eps, D, HALF)
        low, high = _rotated(low, high, cos, sin, token, D, D, HALF)
        _store_halves(out, low, high, token, heads, num_heads, D, HALF)
    else:
        heads = (piece - query_pieces) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots + token)
        low, high = _load_halves(key, token, heads, num_kv_heads, key_token, key_head, D, HALF)
        if NORMED:
            low, high = _normed(low, high, key_norm, key, eps, D, HALF)
        low, high = _rotated(low, high, cos, sin, token, D, D, HALF)
        low, high = _as_in(low, key), _as_in(high, key)
        _store_rows(
            cache,
            kv_scale,
            low,
            high,
            slot,
            0,
            heads,
            num_kv_heads,
            block_size,
            cache_block,
            D,
            ROW,
            HALF,
            FORMAT,
            SCALED,
        )
        low, high = _load_halves(value, token, heads, num_kv_heads, value_token, value_head, D, HALF)
        _store_rows(
            cache,
            kv_scale,
            low,
            high,
            slot,
            1,
            heads,
            num_kv_heads,
            block_size,
            cache_block,
            D,
            ROW,
            HALF,
            FORMAT,
            SCALED,
        )


@implements(ops.rotary_embedding)
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Op `rotary_embedding`. Heads and tokens may be apart in memory."""
    x = _dense_rows(x)
    num_tokens, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        cos, sin, tile = cos.contiguous(), sin.contiguous(), _tile(head_dim, num_heads)
        grid = (num_tokens, triton.cdiv(num_heads, tile["HEADS"]))
        rotary_kernel[grid](x, cos, sin, out, num_heads, x.stride(0), x.stride(1), head_dim, num_warps=2, **tile)
    return out


@implements(ops.write_kv_cache)
def write_kv_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    num_tokens, num_heads, head_dim = key.shape
    if not num_tokens:
        return
    key, value, tile = _dense_rows(key), _dense_rows(value), _tile(head_dim, num_heads)
    stored = _as_stored(kv_cache)
    write_kv_cache_kernel[(num_tokens, triton.cdiv(num_heads, tile["HEADS"]))](
        key, value, stored, slot_mapping if kv_scale is None else kv_scale, slot_mapping,
        num_heads, kv_cache.shape[3], stored.stride(0), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        ROW=kv_cache.shape[4], FORMAT=CACHE_FORMATS.get(kv_cache.dtype, "plain"), SCALED=kv_scale is not None,
        num_warps=2, enable_fp_fusion=False, **tile,
    )  # fmt: skip


@implements(ops.rope_and_write_kv)
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
    """Op `rope_and_write_kv`. Heads and tokens may be apart in memory."""
    query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not num_tokens:
        return out
    stored, tile = _as_stored(kv_cache), _tile(head_dim, num_heads)
    pieces = triton.cdiv(num_heads, tile["HEADS"]) + triton.cdiv(num_kv_heads, tile["HEADS"])
    rotate_and_write_kernel[(num_tokens, pieces)](
        query, key, value, cos.contiguous(), sin.contiguous(), query if query_norm is None else query_norm,
        key if key_norm is None else key_norm, out, stored,
        slot_mapping if kv_scale is None else kv_scale, slot_mapping, num_heads, num_kv_heads, kv_cache.shape[3],
        stored.stride(0),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), eps,
        ROW=kv_cache.shape[4], FORMAT=CACHE_FORMATS.get(kv_cache.dtype, "plain"), SCALED=kv_scale is not None,
        NORMED=query_norm is not None, num_warps=2, enable_fp_fusion=False, **tile,
    )  # fmt: skip
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """A rotation, keys and values into the cache, and both at once."""
    dtype = CACHE_TORCH_DTYPES[shape.dtype]
    cache_dtype = CACHE_TORCH_DTYPES[shape.cache_dtype or shape.dtype]
    head_dim, heads = shape.head_dim, shape.num_kv_heads
    row = {torch.int8: head_dim + 4, torch.uint8: head_dim // 2 + 4}.get(cache_dtype, head_dim)

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    x, angle = empty(16, heads, head_dim), empty(16, 1, head_dim)
    label = f"{shape.dtype} d{head_dim} h{heads}"
    yield label, lambda: rotary_embedding(x, angle, angle)
    cache = empty(shape.num_blocks, 2, heads, shape.block_size, row, dtype=cache_dtype)
    scale = empty(2, heads, dtype=torch.float32) if CACHE_FORMATS.get(cache_dtype) in ("e4m3", "e5m2") else None
    slots = empty(16, dtype=torch.int64)
    into = f"{label} {shape.cache_dtype or shape.dtype} cache{shape.cache_label}"
    yield into, lambda: write_kv_cache(x, x, cache, slots, scale)
    query = empty(16, shape.num_heads, head_dim)
    both = partial(rope_and_write_kv, query, x, x, angle, angle, cache, slots, kv_scale=scale)
    yield into, both
    yield f"{into} normed", partial(both, query_norm=x[0, 0], key_norm=x[0, 0], eps=1e-6)


def _as_stored(kv_cache: Tensor) -> Tensor:
    """Kernels make the bits of 8-bit floats themselves."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else kv_cache


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(head_dim: int, num_heads: int) -> dict[str, int]:
    """As many heads as make about `_TILE` elements."""
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(max(1, _TILE // (2 * half)), triton.next_power_of_2(num_heads))
    return {"D": head_dim, "HALF": half, "HEADS": heads}
