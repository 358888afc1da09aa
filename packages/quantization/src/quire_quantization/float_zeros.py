"""Int4 whose zero points are floating-point numbers, added and not subtracted: value = scale * number + zero.

No op takes such a zero point, and one of whole numbers cannot stand for it: these weights are widened.

Layouts (torchao's `Int4WeightOnlyConfig`):
- plain: two numbers from -8 in a byte [O, I / 2], the first lower; scale and zero [G, O].
- tiles: the second operand of tensor cores, [O / 8][I / 128][32 lanes][4] int32, padded to multiples of 8 outputs and
  1024 inputs. A word has two tiles of 16 inputs of output lane / 4, of each the inputs 2 (lane % 4), the one behind it,
  and the two that are 8 further on; numbers from 0, the middle is 8. Scale and zero side by side [G, O, 2].
Knows tensors; does not know files or names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_quantization.stored import GroupedWeight

__all__ = ["TILE_INPUTS", "TILE_OUTPUTS", "read_int4_plain", "read_int4_tiles"]

TILE_OUTPUTS, TILE_INPUTS = 8, 1024
"""What tiles are padded to."""
_MIDDLE = 8
_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""In a word, four bits at a time from the lowest on: which of the lane's eight inputs, in the order of the inputs."""


def read_int4_plain(packed: Tensor, scale: Tensor, zero: Tensor) -> GroupedWeight:
    """packed: int8 or uint8, see above."""
    numbers = packed.view(torch.int8)
    lower, upper = (numbers << 4) >> 4, numbers >> 4
    return _widened(torch.stack((lower, upper), dim=-1).flatten(1), scale.T, zero.T)


def read_int4_tiles(tiles: Tensor, scale_and_zero: Tensor, outputs: int, inputs: int) -> GroupedWeight:
    """See above; outputs and inputs without what was padded."""
    numbers = torch.empty(*tiles.shape, len(_PLACES), dtype=torch.int8)
    for place, which in enumerate(_PLACES):
        numbers[..., which] = ((tiles >> 4 * place) & 15).to(torch.int8) - _MIDDLE
    # [O / 8, I / 128, output, pair of inputs, word, tile, half of a tile, input of a pair]
    numbers = numbers.view(*tiles.shape[:2], TILE_OUTPUTS, 4, 4, 2, 2, 2)
    rows = numbers.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(len(tiles) * TILE_OUTPUTS, -1)
    scale, zero = (part[:, :outputs].T for part in scale_and_zero.unbind(-1))
    size = rows.shape[1] // scale.shape[1]
    groups = -(-inputs // size)
    return _widened(rows[:outputs, : groups * size], scale[:, :groups], zero[:, :groups], inputs)


def _widened(numbers: Tensor, scale: Tensor, zero: Tensor, inputs: int | None = None) -> GroupedWeight:
    """numbers [O, I], scale and zero [O, G] -> the first inputs, or all."""
    size = numbers.shape[1] // scale.shape[1]
    wide = numbers.float().mul_(scale.float().repeat_interleave(size, dim=1))
    wide += zero.float().repeat_interleave(size, dim=1)
    return GroupedWeight(wide[:, :inputs].contiguous(), torch.ones(len(wide), 1), None)
