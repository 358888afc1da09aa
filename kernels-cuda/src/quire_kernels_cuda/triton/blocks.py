"""Numbers of weights in planes (`quire_ops.block_formats`), taken apart in registers.

A turn reads, of each output, RUNS runs of 16 bytes of the plane of numbers. A byte has two numbers of 4 bits or four of
2 bits; those in the same place of a run's bytes are 16 inputs that lie side by side and share a scale. So a part of a
turn is [BN, RUNS, 16] numbers, with [BN, RUNS] scales.

Shape legend: I inputs, BM, BN: rows and outputs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_constants", "block_part", "block_sum", "first_input"]


@triton.jit
def first_input(byte, PART: tl.constexpr, FORM: tl.constexpr):
    """The input whose number is in place PART (0 the lowest) of a byte of the first plane, counted from its begin."""
    if FORM == "Q2_K" or FORM == "Q3_K":
        result = byte // 32 * 128 + PART * 32 + byte % 32
    elif FORM == "Q6_K":
        result = byte // 64 * 128 + PART * 64 + byte % 64
    elif FORM == "Q4_K" or FORM == "Q5_K":
        result = byte // 32 * 64 + PART * 32 + byte % 32
    else:
        result = byte // 16 * 32 + PART * 16 + byte % 16
    return result


@triton.jit
def block_constants(header):
    """The first two constants of a header, which NVFP4 has."""
    return tl.load(header + 1), tl.load(header + 2)


@triton.jit
def _byte(place, mask):
    return tl.load(place, mask=mask, other=0).to(tl.int32)


@triton.jit
def _word(place, mask, dtype: tl.constexpr):
    """Bits of 16 or 32 that lie side by side, as int32."""
    return tl.load(place.to(tl.pointer_type(dtype)), mask=mask, other=0).to(tl.int32)


@triton.jit
def _float16(bits):
    """The lower 16 bits as float32."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _small(numbers, BITS: tl.constexpr):
    """Numbers of so many bits (int32) -> 2**(BITS - 1) + numbers / 2 in float32: they are the highest bits of its
    mantissa, which takes less than a conversion (Kim et al. 2022, https://arxiv.org/abs/2211.10017)."""
    exponent: tl.constexpr = (126 + BITS) << 23
    return ((numbers << (23 - BITS)) | exponent).to(tl.float32, bitcast=True)


@triton.jit
def _whole(numbers):
    """Numbers from 0 to 255 (int32) -> float32, exactly, in a similar way."""
    return (numbers | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _float8(bits):
    """FP8 e4m3, no NaN (int32) -> float32, smaller by 2**8: with its exponent in the place of float16's."""
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _float4(bits):
    """FP4 e2m1 (int32 from 0 to 15) -> float32: with its exponent in the place of float32's it is smaller by 2**126."""
    shrunk = ((bits & 8) << 28) | ((bits & 7) << 22)
    return shrunk.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _six_bits(place, group, mask, PART: tl.constexpr):
    """Scale and minimum of Q4_K and Q5_K, of group + PART in a block that begins at `place`, group even: (float32,
    float32)."""
    both = _word(place, mask, tl.uint32)
    pair = place + 4 + group % 4
    first = _word(pair, mask, tl.uint16) >> (8 * PART)
    second = _word(pair + 4, mask, tl.uint16) >> (8 * PART)
    rest = _word(pair + 8, mask, tl.uint16) >> (8 * PART)
    scale = tl.where(group < 4, first & 63, (rest & 15) | ((first & 0xC0) >> 2))
    minimum = tl.where(group < 4, second & 63, ((rest >> 4) & 15) | ((second & 0xC0) >> 2))
    return _float16(both) * _whole(scale), _float16(both >> 16) * _whole(minimum)


@triton.jit
def _looked_up(
    numbers, at, byte, mask, header, first, second,
    PART: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """(numbers [BN, RUNS, 16], scale [BN, RUNS]) float32 of the formats whose 4 bits are floats or places in a table.
    `at`: [BN, 1] pointers behind the first plane; the others are as in `block_part`."""
    small = (byte // 16)[None, :]  # block of 32 inputs; of types of 256:
    block = (byte // (32 * BITS))[None, :]
    if FORM == "NVFP4":
        own = _float8(_word(at + small * 2, mask, tl.uint16) >> (8 * PART)) * 256.0
        scale = tl.where(second != 0, own / first, own * first)
        result = _float4(numbers)
    elif FORM == "MXFP4":
        exponent = _byte(at + small, mask)
        scale = tl.where(exponent == 0, 5.877471754111438e-39, (exponent << 23).to(tl.float32, bitcast=True))
        result = _float4(numbers)
    elif FORM == "TABLE4":
        scale = _word(at + small // 2 * 4, mask, tl.uint32).to(tl.float32, bitcast=True)
        result = tl.load(header + 1 + numbers)
    elif FORM == "IQ4_NL":
        scale = _float16(_word(at + small * 2, mask, tl.uint16))
        result = tl.load(header + 1 + numbers)
    else:
        tl.static_assert(FORM == "IQ4_XS", "a format without a form on GPUs")
        group = small % 8
        both = _word(at + block * 8, mask, tl.uint32)  # scale, high bits
        low = (_byte(at + block * 8 + 4 + group // 2, mask) >> (group % 2 * 4)) & 15
        scale = _float16(both) * (_whole((((both >> (16 + group * 2)) & 3) << 4) | low) - 32.0)
        result = tl.load(header + 1 + numbers)
    return result, scale


@triton.jit
def block_part(
    codes, row, byte, mask, inputs, header, first, second,
    PART: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(numbers [BN, RUNS, 16], scale [BN, RUNS], offset [BN, RUNS]) float32: scale * numbers + offset are the weights
    whose bits are in place PART of `codes`.

    Args:
        codes: [BN, RUNS, 16] uint8, bytes of the first plane.
        row: [BN] pointers to the outputs' bytes. byte [RUNS]: where runs begin in the first plane, multiples of 16.
        mask: [BN, RUNS], whether a run is there; the numbers of others are finite.
        first, second: `block_constants`.
        EXACT: The sum is rounded once; else offset may be 16 times as large as the weights, which is for sums that are
            made of numbers first.
    """
    at = row[:, None]
    bits: tl.constexpr = 2 if (FORM == "Q2_K" or FORM == "Q3_K") else 4
    numbers = (codes.to(tl.int32) >> (PART * bits)) & ((1 << bits) - 1)
    lane = tl.arange(0, 16)
    at += inputs * bits // 8  # behind the first plane
    second_plane = (row + tl.multiple_of(inputs * bits // 8, 16))[:, None, None] + lane[None, None, :]
    small = (byte // 16)[None, :]  # block of 32 inputs; of types of 256:
    block = (byte // (32 * bits))[None, :]
    offset = tl.zeros(mask.shape, tl.float32)
    has_five: tl.constexpr = FORM == "Q5_0" or FORM == "Q5_1" or FORM == "Q5_K"
    has_four: tl.constexpr = FORM == "Q4_1" or FORM == "Q4_K"
    four_or_five: tl.constexpr = 5 if has_five else (4 if has_four else 0)
    other_width: tl.constexpr = 6 if FORM == "Q6_K" else (3 if FORM == "Q3_K" else (2 if FORM == "Q2_K" else 0))
    width: tl.constexpr = four_or_five + other_width  # of whole numbers
    if FORM == "NVFP4" or FORM == "MXFP4" or FORM == "TABLE4" or FORM == "IQ4_NL" or FORM == "IQ4_XS":
        result, scale = _looked_up(numbers, at, byte, mask, header, first, second, PART, FORM, bits)
    elif FORM == "Q4_1":
        both = _word(at + small * 4, mask, tl.uint32)
        scale = _float16(both)
        offset = _float16(both >> 16)
    elif FORM == "Q5_0" or FORM == "Q5_1":
        fifth = _word(at + small * 4, mask, tl.uint32) >> (16 * PART)
        numbers = numbers | (((fifth[:, :, None] >> lane[None, None, :]) & 1) << 4)
        at += inputs // 8
        if FORM == "Q5_0":
            scale = _float16(_word(at + small * 2, mask, tl.uint16))
            offset = -16.0 * scale
        else:
            both = _word(at + small * 4, mask, tl.uint32)
            scale = _float16(both)
            offset = _float16(both >> 16)
    elif FORM == "Q4_K":
        scale, minimum = _six_bits(at + block * 16, (byte % 128 // 32 * 2)[None, :], mask, PART)
        offset = -minimum
    elif FORM == "Q5_K":
        group = (byte % 128 // 32 * 2)[None, :]
        place = tl.multiple_of(byte // 128 * 32 + byte % 32, 16)
        fifth = _byte(second_plane + place[None, :, None], mask[:, :, None])
        numbers = numbers | (((fifth >> (group + PART)[:, :, None]) & 1) << 4)
        scale, minimum = _six_bits(at + inputs // 8 + block * 16, group, mask, PART)
        offset = -minimum
    elif FORM == "Q6_K":
        place = tl.multiple_of(byte // 64 * 32 + byte % 32, 16)
        high = _byte(second_plane + place[None, :, None], mask[:, :, None])
        numbers = numbers | (((high >> (byte % 64 // 32 * 2 + 4 * PART)[None, :, None]) & 3) << 4)
        at += inputs // 4
        own = _byte(at + (byte // 64 * 8 + byte % 64 // 16 + 4 * PART)[None, :], mask)
        factor = _float16(_word(at + inputs // 16 + block * 2, mask, tl.uint16))
        scale = factor * (_whole(own ^ 0x80) - 128.0)  # of its sign
        offset = -32.0 * scale
    elif FORM == "Q2_K":
        own = _byte(at + (byte // 32 * 8 + byte % 32 // 16 + 2 * PART)[None, :], mask)
        both = _word(at + inputs // 16 + block * 4, mask, tl.uint32)
        scale = _float16(both) * _whole(own & 15)
        offset = -_float16(both >> 16) * _whole(own >> 4)
    else:
        tl.static_assert(FORM == "Q3_K", "a format without a form on GPUs")
        place = tl.multiple_of(byte // 64 * 32 + byte % 32, 16)
        third = _byte(second_plane + place[None, :, None], mask[:, :, None])
        numbers = numbers | (((third >> (byte % 64 // 32 * 4 + PART)[None, :, None]) & 1) << 2)
        at += inputs // 8
        group = (byte % 64 // 32 * 8 + byte % 32 // 16 + 2 * PART)[None, :]
        low = (_byte(at + block * 12 + group % 8, mask) >> (group // 8 * 4)) & 15
        high = (_byte(at + block * 12 + 8 + group % 4, mask) >> (group // 4 * 2)) & 3
        factor = _float16(_word(at + inputs // 256 * 12 + block * 2, mask, tl.uint16))
        scale = factor * (_whole((high << 4) | low) - 32.0)
        offset = -4.0 * scale
    if width:
        if EXACT:
            result = _whole(numbers)
        else:
            result = _small(numbers, width)
            offset -= scale * (1 << width)
            scale *= 2.0
    return result, scale, offset


@triton.jit
def block_sum(
    x, x_place, inside_row, weight, header, outputs, inside_out, inputs, first_turn, last_turn, row_bytes,
    FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32: rows of x at `x_place` [BM] times a weight's rows `outputs` [BN], over some turns."""
    parts: tl.constexpr = 4 if (FORM == "Q2_K" or FORM == "Q3_K") else 2
    first, second = block_constants(header)
    row = weight + outputs.to(tl.int64) * row_bytes
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for turn in range(first_turn, last_turn):
        byte = turn * (RUNS * 16) + tl.arange(0, RUNS) * 16
        mask = inside_out[:, None] & (byte < inputs // parts)[None, :]
        place = row[:, None, None] + byte[None, :, None] + tl.arange(0, 16)[None, None, :]
        codes = tl.load(place, mask=mask[:, :, None], other=0)
        lane = turn * (RUNS * 16) + tl.arange(0, RUNS * 16)
        for part in tl.static_range(parts):
            numbers, scale, offset = block_part(codes, row, byte, mask, inputs, header, first, second, part, FORM, True)
            values = numbers * scale[:, :, None] + offset[:, :, None]
            elements = tl.reshape(values.to(x.dtype.element_ty), [BN, RUNS * 16])
            col = first_input(lane, part, FORM)
            x_mask = inside_row[:, None] & (col < inputs)[None, :]
            x_tile = tl.load(x + x_place[:, None] + col[None, :], mask=x_mask, other=0.0)
            total = tl.dot(x_tile, tl.trans(elements), total, input_precision="ieee")
    return total
