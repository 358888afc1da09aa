"""What the instructions of AVX-512, its BF16 and VNNI, and AMX give, in numpy: `DEFINITIONS`, `tile_product`.

Written from Intel's manual alone, beside `emulated/immintrin.h`, which it is to check. Operands come as 64 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEFINITIONS", "INDEXES", "tile_product"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Define = Callable[[Bytes, Bytes, Bytes, int], NDArray[np.generic]]

INDEXES = frozenset(
    {
        "permutex2var_epi8",
        "permutex2var_epi16",
        "permutex2var_epi32",
        "permutex2var_ps",
        "permutexvar_epi8",
        "permutexvar_epi16",
        "permutexvar_epi64",
        "shuffle_epi8",
    }
)
"""Those whose third operand says places."""


def f32(x: Bytes) -> Floats:
    return x.view(np.float32)


def i32(x: Bytes) -> NDArray[np.int32]:
    return x.view(np.int32)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: in float64 to odd (Boldo and Melquiond 2008), which leaves the last word to float32."""
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
    return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)


def flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def lower(pairs: Bytes) -> Floats:
    return flushed((pairs.view(np.uint32) << 16).view(np.float32))


def upper(pairs: Bytes) -> Floats:
    return flushed((pairs.view(np.uint32) & 0xFFFF0000).view(np.float32))


def dpbf16(total: Floats, a: Bytes, b: Bytes) -> Floats:
    total = flushed(fma(upper(a), upper(b), flushed(total)))
    return flushed(fma(lower(a), lower(b), total))


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    bits = flushed(x).view(np.uint32).astype(np.uint64)
    rest, halves = bits & 0xFFFF, bits >> 16
    up = (rest > 0x8000) | ((rest == 0x8000) & (halves % 2 == 1))
    return np.where(np.isnan(x), halves | 0x40, halves + up).astype(np.uint16)


def scalef(a: Floats, b: Floats) -> Floats:
    with_finite = np.ldexp(a.astype(np.float64), np.clip(np.floor(np.nan_to_num(b)), -400, 400).astype(int)).astype(
        np.float32
    )
    is_quiet = np.isnan(a) & ((a.view(np.uint32) >> 22 & 1) == 1)  # a signalling NaN stays one that is no number
    by_infinity = np.where(a == 0, np.nan, np.where(is_quiet, np.inf, np.copysign(np.inf, a)))
    by_nothing = np.where(np.isinf(a), np.nan, np.where(is_quiet, 0.0, np.copysign(0.0, a)))
    by_infinity, by_nothing = (np.where(np.isnan(a) & ~is_quiet, np.nan, each) for each in (by_infinity, by_nothing))
    special = np.where(np.isnan(b), b, np.where(b == np.inf, by_infinity, by_nothing))
    return np.where(np.isfinite(b), with_finite, special).astype(np.float32)


def rest_below(x: Floats) -> Floats:
    """x - floor(x) rounded down, and -0 for 0."""
    exact = x.astype(np.float64) - np.floor(x).astype(np.float64)
    # Of a tiny negative x float64 may say 1 too, whose neighbour below is meant.
    rest, inexact = exact.astype(np.float32), (x < 0) & (np.abs(x) < 2.0**-50)
    rest = np.where((rest > exact) | inexact, np.nextafter(rest, np.float32(-1)), rest)
    return np.where(np.isinf(x), np.float32(0), np.where(rest == 0, np.float32(-0.0), rest))


def rest_around(x: Floats) -> Floats:
    rest = x - np.rint(x)
    return np.where(np.isinf(x) | (rest == 0), np.float32(0), rest)


def to_int32(x: Floats) -> NDArray[np.int32]:
    inside = (x >= -(2.0**31)) & (x < 2.0**31)
    return np.where(inside, np.rint(np.where(inside, x, 0)).astype(np.int64), -(2**31)).astype(np.int32)


def reduce_add(x: Floats) -> Floats:
    for width in (8, 4, 2, 1):
        x = x[:width] + x[width : 2 * width]
    return x


def lanes_of(mask: int, count: int) -> NDArray[np.bool_]:
    return np.array([mask >> i & 1 == 1 for i in range(count)])


def packed(chosen: NDArray[np.bool_], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.array([sum(int(bit) << i for i, bit in enumerate(chosen))], dtype=dtype)


def permuted(dtype: type[np.generic], *tables: Bytes, index: Bytes) -> NDArray[np.generic]:
    table = np.concatenate([each.view(dtype) for each in tables])
    return table[index.view(dtype).astype(int) % len(table)]


def shuffled(a: Bytes, index: Bytes) -> Bytes:
    """Of each 16 bytes those that the lower four bits name, or zero where the highest bit is set."""
    within = np.take_along_axis(a.reshape(4, 16), (index & 15).reshape(4, 16).astype(int), axis=1)
    return np.where(index & 0x80, 0, within.reshape(-1)).astype(np.uint8)


def blocks(a: Bytes, b: Bytes, *chosen: int) -> Bytes:
    return np.concatenate([(a if i < 2 else b).reshape(4, 16)[block] for i, block in enumerate(chosen)])


def unpacked(a: Bytes, b: Bytes, width: int, upper_half: bool) -> Bytes:
    """Of each 16 bytes one half, numbers of `width` bytes in turn from a and b."""
    from_a, from_b = (x.reshape(4, 2, 8)[:, int(upper_half)].reshape(4, -1, width) for x in (a, b))
    return np.stack([from_a, from_b], axis=2).reshape(-1)


def dpbusd(total: Bytes, a: Bytes, b: Bytes) -> NDArray[np.int32]:
    products = a.astype(np.int64) * b.view(np.int8).astype(np.int64)
    return (i32(total).astype(np.int64) + products.reshape(16, 4).sum(axis=1)).astype(np.int32)


def pair_products(a: Bytes, b: Bytes) -> NDArray[np.int64]:
    return (a.view(np.int16).astype(np.int64) * b.view(np.int16).astype(np.int64)).reshape(16, 2).sum(axis=1)


DEFINITIONS: dict[str, Define] = {
    "load_ps": lambda a, b, c, m: a,
    "load_si512": lambda a, b, c, m: a,
    "loadu_ps": lambda a, b, c, m: np.concatenate([a[3:], b[:3]]),
    "loadu_si512": lambda a, b, c, m: np.concatenate([a[3:], b[:3]]),
    "maskz_loadu_epi32": lambda a, b, c, m: np.where(
        lanes_of(m, 16), np.concatenate([a[3:], b[:3]]).view(np.uint32), np.uint32(0)
    ),
    "store_ps": lambda a, b, c, m: a,
    "store_si512": lambda a, b, c, m: a,
    "mask_storeu_ps": lambda a, b, c, m: np.concatenate(
        [np.full(3, 0xA5, np.uint8), np.where(lanes_of(m, 16), i32(a), np.int32(-0x5A5A5A5B)).view(np.uint8)]
    ),
    "storeu_ps": lambda a, b, c, m: np.concatenate([np.full(3, 0xA5, np.uint8), a]),
    "storeu_si512": lambda a, b, c, m: np.concatenate([np.full(3, 0xA5, np.uint8), a]),
    "setzero_ps": lambda a, b, c, m: np.zeros(64, np.uint8),
    "setzero_si512": lambda a, b, c, m: np.zeros(64, np.uint8),
    "set1_ps": lambda a, b, c, m: np.tile(a[:4], 16),
    "set1_epi8": lambda a, b, c, m: np.tile(a[:1], 64),
    "set1_epi16": lambda a, b, c, m: np.tile(a[:2], 32),
    "set1_epi32": lambda a, b, c, m: np.tile(a[:4], 16),
    "setr_epi32": lambda a, b, c, m: np.array([*range(15), -15], np.int32),
    "set_epi16": lambda a, b, c, m: np.array([*range(31), -31], np.int16),
    "castps512_ps256": lambda a, b, c, m: a[:32],
    "castsi256_si512": lambda a, b, c, m: a[:32],
    "broadcast_i32x4": lambda a, b, c, m: np.tile(a[:16], 4),
    "mask_broadcast_i32x4": lambda a, b, c, m: np.where(lanes_of(m, 16), i32(np.tile(b[:16], 4)), i32(a)),
    "extractf32x8_ps_0": lambda a, b, c, m: a[:32],
    "extractf32x8_ps_1": lambda a, b, c, m: a[32:],
    "inserti64x4_0": lambda a, b, c, m: np.concatenate([b[:32], a[32:]]),
    "inserti64x4_1": lambda a, b, c, m: np.concatenate([a[:32], b[:32]]),
    "add_ps": lambda a, b, c, m: f32(a) + f32(b),
    "max_ps": lambda a, b, c, m: np.where(f32(a) > f32(b), f32(a), f32(b)),
    "abs_ps": lambda a, b, c, m: i32(a) & 0x7FFFFFFF,
    "fmadd_ps": lambda a, b, c, m: fma(f32(a), f32(b), f32(c)),
    "fmsub_ps": lambda a, b, c, m: fma(f32(a), f32(b), -f32(c)),
    "fnmadd_ps": lambda a, b, c, m: fma(-f32(a), f32(b), f32(c)),
    "reduce_add_ps": lambda a, b, c, m: reduce_add(f32(a)),
    "reduce_max_ps": lambda a, b, c, m: np.array([np.where(f32(a) > 1, f32(a), np.float32(1)).max()]),
    "roundscale_ps_nearest": lambda a, b, c, m: np.rint(f32(a)),
    "roundscale_ps_down": lambda a, b, c, m: np.floor(f32(a)),
    "reduce_ps_down": lambda a, b, c, m: rest_below(f32(a)),
    "reduce_ps_nearest": lambda a, b, c, m: rest_around(f32(a)),
    "maskz_scalef_ps": lambda a, b, c, m: np.where(lanes_of(m, 16), scalef(f32(a), f32(b)), np.float32(0)),
    "add_epi32": lambda a, b, c, m: i32(a) + i32(b),
    "sub_epi16": lambda a, b, c, m: a.view(np.int16) - b.view(np.int16),
    "sub_epi32": lambda a, b, c, m: i32(a) - i32(b),
    "mullo_epi32": lambda a, b, c, m: i32(a) * i32(b),
    "and_si512": lambda a, b, c, m: a & b,
    "or_si512": lambda a, b, c, m: a | b,
    "xor_si512": lambda a, b, c, m: a ^ b,
    "abs_epi8": lambda a, b, c, m: np.abs(a.view(np.int8).astype(np.int16)).astype(np.uint8),
    "madd_epi16": lambda a, b, c, m: pair_products(a, b).astype(np.int32),
    "slli_epi32_7": lambda a, b, c, m: a.view(np.uint32) << 7,
    "srai_epi32_7": lambda a, b, c, m: i32(a) >> 7,
    "srli_epi16_4": lambda a, b, c, m: a.view(np.uint16) >> 4,
    "reduce_add_epi32": lambda a, b, c, m: np.array([i32(a).astype(np.int64).sum()]).astype(np.int32),
    "cmp_ps_mask_unordered": lambda a, b, c, m: packed(np.isnan(f32(a)) | np.isnan(f32(b)), np.uint16),
    "cmp_ps_mask_not_less": lambda a, b, c, m: packed(~(f32(a) < f32(b)), np.uint16),
    "cmpneq_epi32_mask": lambda a, b, c, m: packed(i32(a) != i32(b), np.uint16),
    "knot_mask16": lambda a, b, c, m: np.array([~m & 0xFFFF], np.uint16),
    "mask_mov_ps": lambda a, b, c, m: np.where(lanes_of(m, 16), i32(b), i32(a)),
    "maskz_mov_epi32": lambda a, b, c, m: np.where(lanes_of(m, 16), i32(a), np.int32(0)),
    "cvtepi16_epi32": lambda a, b, c, m: a[:32].view(np.int16).astype(np.int32),
    "cvtepu16_epi32": lambda a, b, c, m: a[:32].view(np.uint16).astype(np.int32),
    "cvtepi8_epi16": lambda a, b, c, m: a[:32].view(np.int8).astype(np.int16),
    "cvtepi8_epi32": lambda a, b, c, m: a[:16].view(np.int8).astype(np.int32),
    "cvtepu8_epi32": lambda a, b, c, m: a[:16].astype(np.int32),
    "cvtepi32_epi16": lambda a, b, c, m: i32(a).astype(np.int16),
    "cvtepi32_epi8": lambda a, b, c, m: i32(a).astype(np.int8),
    "cvtsepi32_epi8": lambda a, b, c, m: np.clip(i32(a), -128, 127).astype(np.int8),
    "cvtepi32_ps": lambda a, b, c, m: i32(a).astype(np.float32),
    "cvtps_epi32": lambda a, b, c, m: to_int32(f32(a)),
    "cvtph_ps": lambda a, b, c, m: a[:32].view(np.float16).astype(np.float32),
    "cvtps_ph": lambda a, b, c, m: f32(a).astype(np.float16),
    "permutex2var_epi8": lambda a, b, c, m: permuted(np.uint8, a, b, index=c),
    "permutex2var_epi16": lambda a, b, c, m: permuted(np.uint16, a, b, index=c),
    "permutex2var_epi32": lambda a, b, c, m: permuted(np.uint32, a, b, index=c),
    "permutex2var_ps": lambda a, b, c, m: permuted(np.uint32, a, b, index=c),
    "permutexvar_epi8": lambda a, b, c, m: permuted(np.uint8, a, index=c),
    "permutexvar_epi16": lambda a, b, c, m: permuted(np.uint16, a, index=c),
    "permutexvar_epi64": lambda a, b, c, m: permuted(np.uint64, a, index=c),
    "shuffle_epi8": lambda a, b, c, m: shuffled(a, c),
    "shuffle_i32x4_88": lambda a, b, c, m: blocks(a, b, 0, 2, 0, 2),
    "shuffle_i32x4_dd": lambda a, b, c, m: blocks(a, b, 1, 3, 1, 3),
    "shuffle_i32x4_44": lambda a, b, c, m: blocks(a, b, 0, 1, 0, 1),
    "shuffle_i32x4_ee": lambda a, b, c, m: blocks(a, b, 2, 3, 2, 3),
    "shuffle_i32x4_1b": lambda a, b, c, m: blocks(a, b, 3, 2, 1, 0),
    "unpacklo_epi8": lambda a, b, c, m: unpacked(a, b, 1, False),
    "unpackhi_epi8": lambda a, b, c, m: unpacked(a, b, 1, True),
    "unpacklo_epi16": lambda a, b, c, m: unpacked(a, b, 2, False),
    "unpackhi_epi16": lambda a, b, c, m: unpacked(a, b, 2, True),
    "unpacklo_epi32": lambda a, b, c, m: unpacked(a, b, 4, False),
    "unpackhi_epi32": lambda a, b, c, m: unpacked(a, b, 4, True),
    "unpacklo_epi64": lambda a, b, c, m: unpacked(a, b, 8, False),
    "unpackhi_epi64": lambda a, b, c, m: unpacked(a, b, 8, True),
    "dpbusd_epi32": lambda a, b, c, m: dpbusd(c, a, b),
    "dpwssd_epi32": lambda a, b, c, m: (i32(c).astype(np.int64) + pair_products(a, b)).astype(np.int32),
    "dpbf16_ps": lambda a, b, c, m: dpbf16(f32(c), a, b),
    "cvtneps_pbh": lambda a, b, c, m: to_bf16(f32(a)),
    "cvtne2ps_pbh": lambda a, b, c, m: np.concatenate([to_bf16(f32(b)), to_bf16(f32(a))]),
}
"""Name in `instructions.cpp` -> (a, b, c, mask) -> what the instruction gives."""


def tile_product(kind: str, total: Bytes, a: Bytes, b: Bytes) -> NDArray[np.generic]:
    """What a product of tiles leaves.

    Args:
        kind: "bf16", "signed" (bytes of both with a sign) or "mixed" (those of b without).
        total: Sums before, [rows, words of a row of b, 4].
        a: [rows, words, 4].
        b: [words, words of a row, 4].

    Returns:
        The sums, [rows, words of a row of b], float32 for "bf16", else int32.
    """
    sums: list[NDArray[np.generic]] = []
    for before, row in zip(total, a, strict=True):
        if kind != "bf16":
            left = row.view(np.int8).astype(np.int64)
            right = (b.view(np.int8) if kind == "signed" else b).astype(np.int64)
            products = np.einsum("ki,kni->n", left, right)
            sums.append((before.copy().view(np.int32)[:, 0].astype(np.int64) + products).astype(np.int32))
            continue
        low = high = np.zeros(b.shape[1], np.float32)
        for pair, others in zip(row, b, strict=True):
            many, each = np.broadcast_to(pair, others.shape).copy().reshape(-1), others.copy().reshape(-1)
            low, high = flushed(fma(lower(many), lower(each), low)), flushed(fma(upper(many), upper(each), high))
        sums.append(flushed(flushed(before.copy().reshape(-1).view(np.float32)) + flushed(low + high)))
    return np.stack(sums)
