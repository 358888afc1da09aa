"""Blocks of ggml's types -> as ops take them: in blocks, or in whole numbers with a scale for each 32 inputs.

Layouts of a block (ggml's own; "low, high" are the halves of 16 bytes: inputs 0 to 15, and 16 to 31):
- Q8_0: scale float16, 32 int8.
- Q4_0: scale float16, low, high of 4 bits with 8 added.
- Q5_0: scale float16, 32 fifth bits, low, high; with 16 added.
- IQ4_NL: scale float16, low, high: places in a table of 16 whole numbers.
- IQ4_XS: of 256 inputs: scale float16, 8 x 2 high bits and 8 x 4 low bits of groups' scales with 32 added, 8 times low,
  high as IQ4_NL's.
- MXFP4: exponent of the scale, low, high as FP4 e2m1 (OCP Microscaling Formats 1.0, sec. 5.3).
The others are described in `quire_ops.block_formats`.
Knows tensors; does not know files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_ops.block_formats import BLOCK_FORMATS, IQ4_VALUES
from quire_quantization.blocks import BlockWeight
from quire_quantization.float4 import FP4_DOUBLED
from quire_quantization.stored import GroupedWeight

__all__ = ["GGML_TYPES", "read_ggml"]


def read_ggml(blocks: Tensor, kind: str, grid: Tensor | None = None) -> GroupedWeight | BlockWeight:
    """blocks [O, bytes of a row] uint8 of a type in `GGML_TYPES`; grid: of a type that has one, as `BLOCK_FORMATS` have
    it in their constants."""
    if kind in BLOCK_FORMATS:
        whole = (lambda rows: _whole_numbers(rows, kind)) if kind in _WHOLE_NUMBERS else None
        return BlockWeight(blocks, kind, constants=grid, whole_numbers=whole)
    return _whole_numbers(blocks, kind)


def _whole_numbers(blocks: Tensor, kind: str) -> GroupedWeight:
    """Elements [O, I], scale [O, I / 32]."""
    rows = blocks.shape[0]
    elements, scale = _WHOLE_NUMBERS[kind](blocks.reshape(-1, GGML_TYPES[kind][1]))
    return GroupedWeight(elements.view(rows, -1), scale.reshape(rows, -1), None, bits=4 if kind == "Q4_0" else 8)


def _scale(blocks: Tensor) -> Tensor:
    return blocks[:, :2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """[..., 16] -> [..., 32] int8 from 0."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1).view(torch.int8)


def _table(values: tuple[int, ...], packed: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[_halves(packed).int()]


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, 2:].contiguous().view(torch.int8), _scale(blocks)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(blocks[:, 2:].contiguous()).sub_(8), _scale(blocks)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    fifth = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    elements = _halves(blocks[:, 6:].contiguous()) | (fifth.flatten(1) << 4).view(torch.int8)
    return elements.sub_(16), _scale(blocks)


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _table(IQ4_VALUES, blocks[:, 2:].contiguous()), _scale(blocks)


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    group = torch.arange(8)
    high = (blocks[:, 2:4].int()[:, group // 4] >> (2 * (group % 4))) & 3
    low = (blocks[:, 4:8].int()[:, group // 2] >> (4 * (group % 2))) & 0xF
    elements = _table(IQ4_VALUES, blocks[:, 8:].reshape(-1, 8, 16))
    return elements.flatten(1), _scale(blocks) * ((high << 4 | low) - 32).float()


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128)
    return _table(FP4_DOUBLED, blocks[:, 1:].contiguous()), scale


_WHOLE_NUMBERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""What reads blocks: [N, bytes] uint8 -> elements [N, inputs] int8, scales [N, groups]."""

GGML_TYPES: dict[str, tuple[int, int]] = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    **{kind: (form.inputs, form.num_bytes) for kind, form in BLOCK_FORMATS.items() if kind not in ("NVFP4", "TABLE4")},
}
"""Type -> inputs of a block, and its bytes."""
