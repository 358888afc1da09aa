"""A matrix as the C interface takes it: pointers, and how the elements are coded.

Knows `MatrixArgument` of `csrc/kernels.cpp` and the forms of weights that ops declare.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire_ops.grouped import group_size_of

__all__ = ["Matrix"]

_PLAIN, _INT8, _W8A8 = 0, 1, 2
_GROUP_CODINGS = {torch.uint8: 3, torch.int8: 4, torch.float8_e4m3fn: 5}


class Matrix(ctypes.Structure):
    """`MatrixArgument`. Does not keep the tensors it points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("coding", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("wide_scale", ctypes.c_int32),
        ("input_scale", ctypes.c_float),
    )

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        zero: Tensor | None = None,
        input_scale: Tensor | None = None,
        *,
        inputs: int,
    ) -> Matrix:
        """The weight of op `linear` (without a scale), `int8_linear` (one scale per output), `w8a8_linear` (and a scale
        of the inputs) or `grouped_linear`."""
        pointers = [None if part is None else part.data_ptr() for part in (weight, scale, zero, bias)]
        if input_scale is not None:
            return cls(*pointers, _W8A8, 0, 0, float(input_scale))
        if scale is None or scale.ndim == 1:
            return cls(*pointers, _PLAIN if scale is None else _INT8, 0, 0)
        group = group_size_of(inputs, scale.shape[1])
        return cls(*pointers, _GROUP_CODINGS[weight.dtype], group, scale.dtype == torch.float32)
