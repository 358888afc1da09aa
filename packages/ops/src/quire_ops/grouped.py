"""Weights whose inputs come in groups, each with a scale per output: the form that op `grouped_linear` takes.

value[o, i] = scale[o, i // group_size] * (element[o, i] - zero[o, i // group_size]), in rows of inputs. Elements are

- int4 (uint8 tensor [O, 64 * ceil(I / 128)]): each with 8 added, two in a byte. 16 outputs lie side by side, fewer
  where the last ones are fewer: their memory is [pieces of 128 inputs, 16, outputs, 4], where byte j of step s holds
  input 4 s + j of the piece in its lower half and input 64 + 4 s + j in its upper half. So one load of 64 bytes gives
  8 inputs of 16 outputs. Inputs behind the last one are zeros.
- int8 (int8 tensor [O, I]), or fp8 e4m3 (float8_e4m3fn tensor [O, I]), as a checkpoint has them.

Scales and zeros are kept for 16 outputs together, [ceil(O / 16), G, 16]: a kernel takes 16 outputs at a time.
Knows this form; does not know how good scales are found, nor the formats of checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUP_SIZES", "block_groups", "dequantize", "group_size_of", "pack_int4", "unblock_groups", "unpack_int4",
           "unpacked_rows"]  # fmt: skip

GROUP_SIZES = (128, 64, 32)
"""Inputs of a group; the last one of a row may be shorter."""
_PIECE = 128
_BLOCK = 16


def pack_int4(elements: Tensor) -> Tensor:
    """elements [O, I] int8 from -8 to 7 -> [O, 64 * ceil(I / 128)] uint8. Parts of whole blocks of 16 outputs may be
    packed one by one, and put together."""
    outputs, inputs = elements.shape
    pieces = -(-inputs // _PIECE)
    padded = torch.nn.functional.pad(elements, (0, pieces * _PIECE - inputs)).add_(8).view(torch.uint8)
    low, high = padded.view(outputs, pieces, 2, _PIECE // 2).unbind(2)
    return _interleave((low | high << 4).view(torch.int32).view(outputs, -1), inverse=False).view(torch.uint8)


def unpack_int4(packed: Tensor, inputs: int) -> Tensor:
    """What `pack_int4` took: [O, inputs] int8."""
    pieces = (
        _interleave(packed.view(torch.int32), inverse=True).view(torch.uint8).view(packed.shape[0], -1, _PIECE // 2)
    )
    both = torch.stack((pieces & 0xF, pieces >> 4), dim=2).to(torch.int8)
    return (both - 8).view(packed.shape[0], -1)[:, :inputs]


def unpacked_rows(packed: Tensor, rows: Tensor, inputs: int) -> Tensor:
    """Some rows of what `pack_int4` took: rows [T] int64 -> [T, inputs] int8."""
    words = packed.view(torch.int32)
    num_rows, steps = words.shape
    first = rows // _BLOCK * _BLOCK
    beside = (num_rows - first).clamp_(max=_BLOCK)[:, None]
    places = first[:, None] * steps + torch.arange(steps, device=rows.device) * beside + (rows - first)[:, None]
    pieces = words.flatten()[places].view(torch.uint8).view(len(rows), -1, _PIECE // 2)
    both = torch.stack((pieces & 0xF, pieces >> 4), dim=2).to(torch.int8)
    return (both - 8).view(len(rows), -1)[:, :inputs]


def _interleave(words: Tensor, *, inverse: bool) -> Tensor:
    """words [O, S] -> each block of 16 rows [16, S] becomes [S, 16]; `inverse`: back."""
    whole = words.shape[0] // _BLOCK * _BLOCK
    out = torch.empty_like(words)
    for part, to in ((words[:whole], out[:whole]), (words[whole:], out[whole:])):
        rows = min(_BLOCK, max(1, part.shape[0]))
        if inverse:
            to.view(-1, rows, words.shape[1]).copy_(part.view(-1, words.shape[1], rows).transpose(1, 2))
        else:
            to.view(-1, words.shape[1], rows).copy_(part.view(-1, rows, words.shape[1]).transpose(1, 2))
    return out


def block_groups(values: Tensor) -> Tensor:
    """values [O, G] -> [ceil(O / 16), G, 16]; what stands for outputs behind the last one is zero."""
    outputs, groups = values.shape
    blocks = -(-outputs // _BLOCK)
    padded = torch.zeros(blocks * _BLOCK, groups, dtype=values.dtype, device=values.device)
    padded[:outputs] = values
    return padded.view(blocks, _BLOCK, groups).transpose(1, 2).contiguous()


def unblock_groups(blocked: Tensor, outputs: int) -> Tensor:
    """What `block_groups` took: [outputs, G]."""
    return blocked.transpose(1, 2).reshape(-1, blocked.shape[1])[:outputs]


def group_size_of(inputs: int, num_groups: int) -> int:
    """The size of the groups that so many inputs are cut into."""
    return next(size for size in reversed(GROUP_SIZES) if -(-inputs // size) == num_groups)


def dequantize(weight: Tensor, scale: Tensor, zero: Tensor | None, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight [O, inputs] in `dtype`; arguments as op `grouped_linear` takes them."""
    outputs = weight.shape[0]
    size = group_size_of(inputs, scale.shape[1])

    def of_inputs(values: Tensor) -> Tensor:
        return unblock_groups(values, outputs).to(dtype).repeat_interleave(size, dim=1)[:, :inputs]

    elements = (unpack_int4(weight, inputs) if weight.dtype == torch.uint8 else weight).to(dtype)
    if zero is not None:
        elements -= of_inputs(zero)
    return elements.mul_(of_inputs(scale))
