"""Weights in blocks: some inputs of an output, packed side by side with their scales, as checkpoints have them.

What op `block_linear` multiplies with is a tensor [O, bytes of a row] uint8, and a header (`block_header`) with the
number of the format and its constants. Layouts of a block, "halves" being 16 bytes whose lower halves are 16 numbers of
4 bits and whose upper halves are the next 16, "scale" and "minimum" float16:

- Q4_1: scale, minimum, halves. value = scale * number + minimum.
- Q5_0, Q5_1: the same without and with a minimum, behind them 4 bytes with the fifth bits of 32 numbers, halves. Of
  numbers of Q5_0 16 is taken off.
- Q2_K: 16 bytes, of each 16 inputs 4 bits of scale and 4 of minimum, 64 bytes of numbers of 2 bits, scale and minimum
  of those.
- Q3_K: 32 bytes of third bits, 64 bytes of numbers of 2 bits, 12 bytes with 16 scales of 6 bits, scale of those.
- Q4_K, Q5_K: scale and minimum of those, 12 bytes with 8 scales and 8 minimums of 6 bits, of Q5_K 32 bytes of fifth
  bits, 128 bytes of 4 bits. value = scale * number - minimum; so for Q2_K.
- Q6_K: 128 bytes of 4 lower bits, 64 of 2 upper ones, 16 scales in int8, scale of those.
- IQ4_NL: scale, halves: places in a table of 16 whole numbers. IQ4_XS: see `quire_quantization.ggml`.
- MXFP4: exponent of a power of two, halves as FP4 e2m1 (OCP Microscaling Formats 1.0, sec. 5.3).
- NVFP4: two scales in fp8 e4m3, the first of the lower halves, halves as FP4 e2m1. Constants: what all scales are
  multiplied with, and 1 where they are divided by it.
- TABLE4: scale in float32, twice halves: places in the table that the constants are (bitsandbytes' NF4 and FP4).
- IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M: 256 inputs, of which each eight (of IQ3 each four) are an entry
  of a grid, with signs, and each 16 or 32 have a scale. Constants: the grid, a byte a number; of IQ1, to whose numbers
  an eighth is added or taken off, eight times as large.

All but NVFP4 and TABLE4 are types of ggml, and their blocks are ggml's.

In planes (`in_planes`) the same bytes of an output are sorted: those of one kind (`BlockFormat.planes`) of all of its
blocks, then those of the next, and zeros up to a multiple of 16. The numbers come first. That is for GPUs, which read
16 bytes at a time where these begin at a multiple of 16; a block of 18 bytes would be read by two.

Knows bytes; does not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK_FORMATS",
    "E2M1_VALUES",
    "IQ4_VALUES",
    "BlockFormat",
    "block_header",
    "decode_blocks",
    "format_in_planes",
    "in_planes",
]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""FP4 e2m1 by its bits."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NUM_CONSTANTS = 16


class BlockFormat(NamedTuple):
    """A way to pack weights."""

    inputs: int
    """Of a block."""
    num_bytes: int
    """Of a block."""
    decode: Callable[[Tensor, Tensor], Tensor]
    """(blocks [N, num_bytes] uint8, constants float32) -> [N, inputs] float32."""
    planes: tuple[tuple[int, int], ...] = ()
    """First and end byte of what each plane has of a block, all of it once; empty where there are no planes."""
    grid: int = 0
    """Numbers of an entry of the grid that the constants are; 0 where there is none."""

    def row_bytes(self, inputs: int) -> int:
        """Bytes of an output with so many inputs, which are whole blocks."""
        return inputs // self.inputs * self.num_bytes


def block_header(name: str, constants: Tensor | None = None, *, planes: bool = False) -> Tensor:
    """[17] float32: the number of a format, from 1, and its constants [2] or [16]; longer for a grid, whose bytes are
    kept as numbers. planes: of a weight in planes, longer by the number of the format, so that whoever launches a
    kernel knows it without reading the tensor."""
    number = 1 + list(BLOCK_FORMATS).index(name)
    if planes and constants is None and name.startswith("IQ4"):
        constants = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    header = torch.zeros(1 + max(_NUM_CONSTANTS, 0 if constants is None else len(constants)) + planes * number)
    header[0] = number
    if constants is not None:
        header[1 : 1 + len(constants)] = constants
    return header


def format_in_planes(header: Tensor) -> str | None:
    """The name of the format, of a header of a weight in planes; None of another. Only the length is looked at."""
    index = len(header) - _NUM_CONSTANTS - 2
    names = list(BLOCK_FORMATS)
    return names[index] if 0 <= index < len(names) and BLOCK_FORMATS[names[index]].planes else None


def in_planes(weight: Tensor, name: str) -> Tensor:
    """weight [O, bytes of a row] uint8 in blocks of a format that has planes -> the same in planes, [O, bytes of a row,
    up to a multiple of 16]."""
    form = BLOCK_FORMATS[name]
    blocks = weight.unflatten(1, (-1, form.num_bytes))
    planes = torch.cat([blocks[:, :, begin:end].flatten(1) for begin, end in form.planes], dim=1)
    return torch.nn.functional.pad(planes, (0, -planes.shape[1] % 16))


def _in_blocks(weight: Tensor, form: BlockFormat) -> Tensor:
    """What `in_planes` gives -> [O, blocks, bytes of a block]."""
    count = weight.shape[1] // form.num_bytes
    blocks = weight.new_empty(len(weight), count, form.num_bytes)
    first = 0
    for begin, end in form.planes:
        size = count * (end - begin)
        blocks[:, :, begin:end] = weight[:, first : first + size].unflatten(1, (count, end - begin))
        first += size
    return blocks


def decode_blocks(weight: Tensor, header: Tensor) -> Tensor:
    """weight [O, bytes of a row] uint8, in blocks or in planes, header of `block_header` -> [O, I] float32."""
    name = format_in_planes(header)
    if name is not None:
        form = BLOCK_FORMATS[name]
        blocks = _in_blocks(weight, form)
    else:
        form = list(BLOCK_FORMATS.values())[int(header[0]) - 1]
        blocks = weight.unflatten(1, (-1, form.num_bytes))
    decoded = form.decode(blocks.reshape(-1, form.num_bytes), header[1:])
    return decoded.view(len(weight), blocks.shape[1] * decoded.shape[1])


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The float16 at a byte of each block [N, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """[..., 16] -> [..., 32] int32 from 0 to 15."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1).int()


def _fifth_bits(packed: Tensor) -> Tensor:
    """[N, 4] -> [N, 32]: 16 or 0."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1).int() << 4


def _q4_1(blocks: Tensor, _: Tensor) -> Tensor:
    return _half(blocks, 0) * _halves(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Tensor, _: Tensor) -> Tensor:
    return _half(blocks, 0) * ((_halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) - 16)


def _q5_1(blocks: Tensor, _: Tensor) -> Tensor:
    return _half(blocks, 0) * (_halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _half(blocks, 2)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """[N, 64] -> [N, 16 groups, 16]: numbers of 2 bits, of each 32 bytes first all lowest ones."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return ((packed.view(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 16, 16).int()


def _q2_k(blocks: Tensor, _: Tensor) -> Tensor:
    factor = _half(blocks, 80) * (blocks[:, :16] & 0xF)
    minimum = _half(blocks, 82) * (blocks[:, :16] >> 4)
    numbers = _pairs_of_bits(blocks[:, 16:80].contiguous())
    return (factor[:, :, None] * numbers - minimum[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor, _: Tensor) -> Tensor:
    groups = torch.arange(16)
    low = (blocks[:, 96:104].int()[:, groups % 8] >> (groups // 8 * 4)) & 0xF
    high = (blocks[:, 104:108].int()[:, groups % 4] >> (groups // 4 * 2)) & 3
    factor = _half(blocks, 108) * ((low | high << 4) - 32)
    third = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    numbers = _pairs_of_bits(blocks[:, 32:96].contiguous()) - 4 + (third.reshape(-1, 16, 16).int() << 2)
    return (factor[:, :, None] * numbers).flatten(1)


def _scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 12] -> two times [N, 8], of 6 bits each."""
    first, second, rest = packed.int().view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (rest & 15) | first >> 6 << 4), dim=1)
    return scales, torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)


def _q4_k(blocks: Tensor, _: Tensor) -> Tensor:
    numbers = blocks[:, 16:].reshape(-1, 4, 1, 32) >> torch.tensor([[0], [4]], dtype=torch.uint8)
    return _with_minimums(blocks, (numbers & 15).reshape(-1, 8, 32).int())


def _q5_k(blocks: Tensor, _: Tensor) -> Tensor:
    numbers = blocks[:, 48:].reshape(-1, 4, 1, 32) >> torch.tensor([[0], [4]], dtype=torch.uint8)
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _with_minimums(blocks, (numbers & 15).reshape(-1, 8, 32).int() | fifth.int() << 4)


def _with_minimums(blocks: Tensor, numbers: Tensor) -> Tensor:
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    factor, least = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (factor[:, :, None] * numbers - least[:, :, None]).flatten(1)


def _q6_k(blocks: Tensor, _: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> torch.tensor([[0], [4]], dtype=torch.uint8)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    numbers = (low & 15).reshape(-1, 16, 16).int() | (high & 3).reshape(-1, 16, 16).int() << 4
    factor = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (factor[:, :, None] * (numbers - 32)).flatten(1)


def _iq4_nl(blocks: Tensor, _: Tensor) -> Tensor:
    return _half(blocks, 0) * torch.tensor(IQ4_VALUES)[_halves(blocks[:, 2:])]


def _iq4_xs(blocks: Tensor, _: Tensor) -> Tensor:
    group = torch.arange(8)
    high = (blocks[:, 2:4].int()[:, group // 4] >> (2 * (group % 4))) & 3
    low = (blocks[:, 4:8].int()[:, group // 2] >> (4 * (group % 2))) & 0xF
    factor = _half(blocks, 0) * ((high << 4 | low) - 32)
    values = torch.tensor(IQ4_VALUES)[_halves(blocks[:, 8:].reshape(-1, 8, 16))]
    return (factor[:, :, None] * values).flatten(1)


def _mxfp4(blocks: Tensor, _: Tensor) -> Tensor:
    scale = torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 127)
    return torch.tensor(E2M1_VALUES)[_halves(blocks[:, 1:])] * scale


def _nvfp4(blocks: Tensor, constants: Tensor) -> Tensor:
    own = blocks[:, :2].contiguous().view(torch.float8_e4m3fn).float()
    scales = own / constants[0] if constants[1] else own * constants[0]
    return torch.tensor(E2M1_VALUES)[_halves(blocks[:, 2:])] * scales.repeat_interleave(16, dim=1)


def _table4(blocks: Tensor, constants: Tensor) -> Tensor:
    scale = blocks[:, :4].contiguous().view(torch.float32)
    return constants[_halves(blocks[:, 4:].reshape(-1, 2, 16))].flatten(1) * scale


def _bits(numbers: Tensor, count: int, width: int = 1) -> Tensor:
    """[...] -> [..., count]: `width` bits each, the lowest first."""
    return (numbers[..., None] >> torch.arange(0, count * width, width)) & ((1 << width) - 1)


def _words(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, bytes] uint8 -> [N, words] int64, not negative."""
    return packed.contiguous().view(dtype).long() & ((1 << 8 * dtype.itemsize) - 1)


def _signed(numbers: Tensor, signs: Tensor) -> Tensor:
    """numbers [N, 256], signs [N, 32]: a bit for each, the lowest first."""
    return torch.where(_bits(signs, 8).flatten(1) > 0, -numbers, numbers)


def _even_signs(seven: Tensor) -> Tensor:
    """Seven signs and the one that makes the count of ones even."""
    return seven | (_bits(seven, 7).sum(-1) & 1) << 7


def _entries(constants: Tensor, entries: Tensor, size: int) -> Tensor:
    """entries [N, 256 / size] -> [N, 256] float32."""
    return constants.contiguous().view(torch.int8).view(-1, size)[entries].flatten(1).float()


def _times_scales(numbers: Tensor, scales: Tensor) -> Tensor:
    return numbers * scales.repeat_interleave(256 // scales.shape[1], dim=1)


def _iq2_xxs(blocks: Tensor, constants: Tensor) -> Tensor:
    words = _words(blocks[:, 2:], torch.int32).view(-1, 8, 2)
    entries = _bits(words[..., 0], 4, 8).flatten(1)
    signs = _even_signs(_bits(words[..., 1], 4, 7)).flatten(1)
    scales = _half(blocks, 0) * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    return _times_scales(_signed(_entries(constants, entries, 8), signs), scales)


def _iq2_xs(blocks: Tensor, constants: Tensor) -> Tensor:
    words = _words(blocks[:, 2:66], torch.int16)
    scales = _half(blocks, 0) * (0.5 + _bits(blocks[:, 66:].long(), 2, 4).flatten(1).float()) * 0.25
    return _times_scales(_signed(_entries(constants, words & 511, 8), _even_signs(words >> 9)), scales)


def _iq2_s(blocks: Tensor, constants: Tensor) -> Tensor:
    entries = blocks[:, 2:34].long() | _bits(blocks[:, 66:74].long(), 4, 2).flatten(1) << 8
    scales = _half(blocks, 0) * (0.5 + _bits(blocks[:, 74:].long(), 2, 4).flatten(1).float()) * 0.25
    return _times_scales(_signed(_entries(constants, entries, 8), blocks[:, 34:66].long()), scales)


def _iq3_xxs(blocks: Tensor, constants: Tensor) -> Tensor:
    words = _words(blocks[:, 66:], torch.int32)
    signs = _even_signs(_bits(words, 4, 7)).flatten(1)
    scales = _half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
    return _times_scales(_signed(_entries(constants, blocks[:, 2:66].long(), 4), signs), scales)


def _iq3_s(blocks: Tensor, constants: Tensor) -> Tensor:
    entries = blocks[:, 2:66].long() | _bits(blocks[:, 66:74].long(), 8).flatten(1) << 8
    scales = _half(blocks, 0) * (1 + 2 * _bits(blocks[:, 106:].long(), 2, 4).flatten(1).float())
    return _times_scales(_signed(_entries(constants, entries, 4), blocks[:, 74:106].long()), scales)


def _iq1_s(blocks: Tensor, constants: Tensor) -> Tensor:
    words = _words(blocks[:, 34:], torch.int16)
    entries = blocks[:, 2:34].long() | _bits(words, 4, 3).flatten(1) << 8
    shift = (1 - 2 * (words >> 15)).repeat_interleave(32, dim=1)
    scales = _half(blocks, 0) * (2 * (words >> 12 & 7) + 1).float() * 0.125
    return _times_scales(_entries(constants, entries, 8) + shift, scales)


def _iq1_m(blocks: Tensor, constants: Tensor) -> Tensor:
    words, own = _words(blocks[:, 48:], torch.int16), _bits(blocks[:, 32:48].long(), 2, 4).flatten(1)
    scale = ((words >> 12) << torch.arange(0, 16, 4)).sum(1).to(torch.uint16).view(torch.float16).float()
    shift = (1 - 2 * (own >> 3)).repeat_interleave(8, dim=1)
    scales = scale[:, None] * (2 * _bits(words, 4, 3).flatten(1) + 1).float() * 0.125
    return _times_scales(_entries(constants, blocks[:, :32].long() | (own & 7) << 8, 8) + shift, scales)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q4_1": BlockFormat(32, 20, _q4_1, ((4, 20), (0, 4))),
    "Q5_0": BlockFormat(32, 22, _q5_0, ((6, 22), (2, 6), (0, 2))),
    "Q5_1": BlockFormat(32, 24, _q5_1, ((8, 24), (4, 8), (0, 4))),
    "Q2_K": BlockFormat(256, 84, _q2_k, ((16, 80), (0, 16), (80, 84))),
    "Q3_K": BlockFormat(256, 110, _q3_k, ((32, 96), (0, 32), (96, 108), (108, 110))),
    "Q4_K": BlockFormat(256, 144, _q4_k, ((16, 144), (0, 16))),
    "Q5_K": BlockFormat(256, 176, _q5_k, ((48, 176), (16, 48), (0, 16))),
    "Q6_K": BlockFormat(256, 210, _q6_k, ((0, 128), (128, 192), (192, 208), (208, 210))),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl, ((2, 18), (0, 2))),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs, ((8, 136), (0, 8))),
    "MXFP4": BlockFormat(32, 17, _mxfp4, ((1, 17), (0, 1))),
    "NVFP4": BlockFormat(32, 18, _nvfp4, ((2, 18), (0, 2))),
    "TABLE4": BlockFormat(64, 36, _table4, ((4, 36), (0, 4))),
    "IQ2_XXS": BlockFormat(256, 66, _iq2_xxs, grid=8),
    "IQ2_XS": BlockFormat(256, 74, _iq2_xs, grid=8),
    "IQ2_S": BlockFormat(256, 82, _iq2_s, grid=8),
    "IQ3_XXS": BlockFormat(256, 98, _iq3_xxs, grid=4),
    "IQ3_S": BlockFormat(256, 110, _iq3_s, grid=4),
    "IQ1_S": BlockFormat(256, 50, _iq1_s, grid=8),
    "IQ1_M": BlockFormat(256, 56, _iq1_m, grid=8),
}
"""By name, in the order of their numbers."""
