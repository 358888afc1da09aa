"""A matrix as the C interface takes it: pointers, and how the elements are kept.

Knows `MatrixArgument` of `csrc/kernels.h` and the forms of weights that ops declare.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from quire_kernels_cpu.abi import STRUCTS
from quire_ops.grouped import group_size_of

__all__ = ["matrix_argument"]

_PLAIN, _INT8, _W8A8 = 0, 1, 2
_GROUP_FORMATS = {torch.uint8: 3, torch.int8: 4, torch.float8_e4m3fn: 5}


def matrix_argument(
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    inputs: int,
    rank_sizes: int | None = None,
) -> ctypes.Structure:
    """The weight of op `linear` (without a scale), `int8_linear` (one scale per output), `w8a8_linear` (and a scale of
    the inputs), `block_linear` (the header as its scale) or `grouped_linear`. Does not keep what it points to.

    Args:
        rank_sizes: Where it lies how many outputs each rank has [ranks] int64, where ranks share them out.
    """
    if weight.dtype == torch.uint8 and scale is not None and scale.ndim == 1:
        return STRUCTS["MatrixArgument"](
            data=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            format=_PLAIN,
            rank_sizes=rank_sizes,
            block_format=int(scale[0]),
            block_constants=scale.data_ptr() + scale.element_size(),
        )
    parts = {"data": weight, "scale": scale, "zero": zero, "bias": bias}
    fields = {name: part.data_ptr() for name, part in parts.items() if part is not None}
    make = partial(STRUCTS["MatrixArgument"], rank_sizes=rank_sizes)
    if input_scale is not None:
        return make(**fields, format=_W8A8, input_scale=float(input_scale))
    if scale is None or scale.ndim == 1:
        return make(**fields, format=_PLAIN if scale is None else _INT8)
    group = group_size_of(inputs, scale.shape[1])
    return make(**fields, format=_GROUP_FORMATS[weight.dtype], group=group, wide_scale=scale.dtype == torch.float32)
