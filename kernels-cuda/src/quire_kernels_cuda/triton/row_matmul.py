"""One row times int4 weights (`quire_ops.grouped`), without matrix units.

A tile of a matrix product would have 15 rows of padding beside the one, and each weight would be widened, written to
shared memory and read again in the order that matrix units want. Here it is shifted, put into a float32 and multiplied
where it was loaded: three instructions.

Of 8 * (1 + n / 16) the four highest bits of the mantissa are n, of 0 to 15 (the magic numbers of Kim et al. 2022,
https://arxiv.org/abs/2211.10017). It is n / 2 + 8, so that sum((n - 8 - zero) * x) is twice
sum((n / 2 + 8) * x) - (12 + zero / 2) * sum(x).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["row_matmul_kernel"]


@triton.jit
def row_matmul_kernel(
    x, weight, scale, zero, bias, out, num_outputs, inputs, row_words, num_groups, split_inputs,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr, BN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """out [O], or with several splits [NUM_SPLITS, O] float32 parts: a row x [I] times a weight.

    Args:
        weight: As int32: of a piece of 128 inputs 16 words of each output, those of 16 outputs side by side. Byte j of
            word s has input 4 s + j of the piece below and input 64 + 4 s + j above.
        row_words: Of an output.
        split_inputs: Of a program; whole pieces.
        GROUP: Inputs that share a scale: 128, 64 or 32. IS_WHOLE: inputs are whole pieces.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BN + tl.arange(0, BN)
    inside_out = outputs < num_outputs
    beside = tl.minimum(16, num_outputs - outputs // 16 * 16)
    weight += tile.to(tl.int64) * BN * row_words
    first_word = tl.arange(0, BN) // 16 * 16 * row_words + tl.arange(0, BN) % 16
    first_group = outputs // 16 * num_groups * 16 + outputs % 16
    lane = tl.arange(0, 16)
    total = tl.zeros([BN, 16], tl.float32)
    first = split * split_inputs
    for begin in tl.range(first, tl.minimum(first + split_inputs, inputs), 128, num_stages=NUM_STAGES):
        place = first_word[:, None] + (begin // 8 + lane)[None, :] * beside[:, None]
        words = tl.load(weight + place, mask=inside_out[:, None], other=0)
        x_at = x + begin + 4 * lane
        part = tl.zeros([BN, 16], tl.float32)
        seen = tl.zeros([16], tl.float32)
        for half in tl.static_range(2):
            for byte in tl.static_range(4):
                col = 64 * half + byte
                if IS_WHOLE:
                    numbers = tl.load(x_at + col).to(tl.float32)
                else:
                    numbers = tl.load(x_at + col, mask=begin + 4 * lane + col < inputs, other=0.0).to(tl.float32)
                if 8 * byte + 4 * half < 19:
                    bits = words << (19 - 8 * byte - 4 * half)
                else:
                    bits = words >> (8 * byte + 4 * half - 19)
                part += ((bits & 0x00780000) | 0x41000000).to(tl.float32, bitcast=True) * numbers[None, :]
                seen += numbers
            if GROUP < 128 or half == 1:
                # A piece behind the last group multiplies zeros; its scale must still be one that is there.
                if GROUP == 32:  # two groups in a half
                    group = tl.minimum((begin + 64 * half + 4 * lane) // GROUP, num_groups - 1)
                    at = first_group[:, None] + group[None, :] * 16
                else:
                    at = first_group[:, None] + tl.minimum((begin + 64 * half) // GROUP, num_groups - 1) * 16
                offset = 12.0
                if HAS_ZERO:
                    offset += tl.load(zero + at, mask=inside_out[:, None], other=0).to(tl.float32) * 0.5
                scales = tl.load(scale + at, mask=inside_out[:, None], other=0).to(tl.float32)
                total += (part - offset * seen[None, :]) * scales
                part = tl.zeros([BN, 16], tl.float32)
                seen = tl.zeros([16], tl.float32)
    result = tl.sum(total, 1) * 2.0
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=inside_out, other=0).to(tl.float32)
    tl.store(out + split.to(tl.int64) * num_outputs + outputs, result.to(out.dtype.element_ty), mask=inside_out)
