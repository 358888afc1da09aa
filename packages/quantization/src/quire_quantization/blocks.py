"""Weights that stay in blocks, as checkpoints pack them, for op `block_linear`; and what they are where nothing has it.

Types of ggml are kept byte by byte. NVFP4 and MXFP4 of other checkpoints, and the codes of bitsandbytes, are packed
anew: their numbers stay, and lie side by side with their scales. Knows tensors; does not know files or names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.block_formats import BLOCK_FORMATS, block_header, decode_blocks, in_planes
from quire_quantization.numbers import are_absent
from quire_quantization.stored import GroupedWeight

__all__ = ["BlockWeight", "blocks_of"]

_PIECE = 1 << 22
"""Numbers that are decoded at a time."""


class BlockWeight(NamedTuple):
    """A weight in blocks of one of `BLOCK_FORMATS`."""

    blocks: Tensor
    """[O, bytes of a row] uint8."""
    form: str
    """A name of `BLOCK_FORMATS`."""
    constants: Tensor | None = None
    """[2] or [16] float32, of a format that has some."""
    whole_numbers: Callable[[Tensor], GroupedWeight] | None = None
    """`blocks` -> the same in whole numbers with a scale for each 32 inputs; None where there is no such form."""

    def outputs(self, start: int, stop: int) -> BlockWeight:
        """The weight of some of its outputs."""
        return self._replace(blocks=self.blocks[start:stop], whole_numbers=None)

    def header(self) -> Tensor:
        """As op `block_linear` takes it."""
        return _grid_header(self) if BLOCK_FORMATS[self.form].grid else block_header(self.form, self.constants)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[O, I], decoded some outputs at a time."""
        form, header = BLOCK_FORMATS[self.form], self.header()
        outputs, inputs = len(self.blocks), self.blocks.shape[1] // form.num_bytes * form.inputs
        out = torch.empty(outputs, inputs, dtype=dtype)
        if not are_absent():
            step = max(1, _PIECE // inputs)
            for begin in range(0, outputs, step):
                out[begin : begin + step] = decode_blocks(self.blocks[begin : begin + step], header)
        return out

    def linear_weights(self, *, planes: bool = False) -> dict[str, Tensor]:
        """As op `block_linear` takes them. planes: its backend takes them so (`OpBackend.planes`)."""
        if planes:
            header = block_header(self.form, self.constants, planes=True)
            return {"weight": in_planes(self.blocks, self.form), "scale": header}
        return {"weight": self.blocks.contiguous(), "scale": self.header()}


_GRID_HEADERS: dict[tuple[str, int], Tensor] = {}
"""(form, where its grid lies) -> the header, which all weights share: grids are larger than a small matrix."""


def _grid_header(weight: BlockWeight) -> Tensor:
    assert weight.constants is not None
    key = (weight.form, weight.constants.data_ptr())
    found = _GRID_HEADERS.get(key)
    if found is None or not torch.equal(found[1:].view(torch.int32), weight.constants.view(torch.int32)):
        found = _GRID_HEADERS[key] = block_header(weight.form, weight.constants)
    return found


def _halves(numbers: Tensor) -> Tensor:
    """numbers [..., 32] from 0 to 15 -> [..., 16] uint8: the first 16 in the lower halves."""
    low, high = numbers.to(torch.uint8).unflatten(-1, (2, 16)).unbind(-2)
    return torch.bitwise_or(low, high << 4)


def blocks_of(scales: Tensor, numbers: Tensor, form: str) -> Tensor:
    """scales [O, blocks, bytes] uint8, numbers [O, I] from 0 to 15 -> [O, bytes of a row] uint8."""
    size = BLOCK_FORMATS[form].inputs
    packed = _halves(numbers.unflatten(1, (-1, size // 32, 32))).flatten(2)
    return torch.cat((scales, packed), dim=2).flatten(1)
