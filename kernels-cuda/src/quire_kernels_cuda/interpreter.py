"""Makes Triton's interpreter compute bfloat16 and 8-bit floats as GPUs do.

The interpreter (TRITON_INTERPRET=1) runs a kernel with numpy on the CPU. numpy has neither type, so Triton 3.6 to 3.9
adds, multiplies and compares their bits as if they were integers, and rounds float32 to them wrongly (towards zero, or
past the largest number). `repair` widens such operands to float32 first and rounds results with torch, to nearest even;
8-bit floats stop at their largest finite number, as the conversions of GPUs do. Nor do infinities raise warnings.

Knows Triton's interpreter from within, and nothing about any kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

__all__ = ["repair"]

_Handle: TypeAlias = Any
"""Triton's TensorHandle; Triton has no types."""

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
"""What numpy cannot compute in."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def repair() -> None:
    """Repair the interpreter of this process. Further calls do nothing."""
    builder = interpreter.InterpreterBuilder
    plain_convert = interpreter._convert_float
    plain_binary, plain_ternary, plain_unary = builder.binary_op, builder.ternary_op, builder.unary_op
    plain_dot = builder.create_dot
    plain_fma: Any = getattr(builder, "create_fma", None)  # of some versions
    plain_cast = builder.cast_impl
    plain_launch = interpreter.GridExecutor.__call__

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if source in _TORCH and target in _TORCH and not str(rounding).endswith("RTZ"):
            return _round(data, source, target)
        converted: np.ndarray = plain_convert(data, source, target, rounding)
        return converted

    def binary_op(self: Any, left: _Handle, right: _Handle, op: Any) -> _Handle:
        if left.dtype.scalar not in _NARROW:
            return plain_binary(self, left, right, op)
        return _narrowed(plain_binary(self, _widened(left), _widened(right), op), left.dtype.scalar)

    def ternary_op(self: Any, first: _Handle, second: _Handle, third: _Handle, op: Any) -> _Handle:
        if third.dtype.scalar not in _NARROW:
            return plain_ternary(self, first, second, third, op)
        wide = plain_ternary(self, _widened(first), _widened(second), _widened(third), op)
        return _narrowed(wide, third.dtype.scalar)

    def unary_op(self: Any, value: _Handle, op: Any) -> _Handle:
        if value.dtype.scalar not in _NARROW:
            return plain_unary(self, value, op)
        return _narrowed(plain_unary(self, _widened(value), op), value.dtype.scalar)

    def create_dot(self: Any, left: _Handle, right: _Handle, total: _Handle, *rest: Any) -> _Handle:
        return plain_dot(self, _widened(left), _widened(right), total, *rest)

    def create_fma(self: Any, x: _Handle, y: _Handle, z: _Handle) -> _Handle:
        return _narrowed(plain_fma(self, _widened(x), _widened(y), _widened(z)), z.dtype.scalar)

    def get_bf16(self: Any, value: float) -> _Handle:
        return _narrowed(self.get_fp32(value), tl.bfloat16)

    def cast_impl(self: Any, source: _Handle, target: tl.dtype) -> _Handle:
        if target.scalar not in _NARROW or source.dtype.scalar in _TORCH:
            return plain_cast(self, _widened(source) if not target.scalar.is_floating() else source, target)
        return _narrowed(plain_cast(self, source, tl.float32), target.scalar)  # a whole number

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):  # GPUs warn of nothing
            plain_launch(self, *args, **kwargs)

    interpreter._convert_float = convert
    interpreter.GridExecutor.__call__ = launch
    builder.binary_op, builder.ternary_op, builder.unary_op = binary_op, ternary_op, unary_op
    builder.create_dot, builder.get_bf16, builder.cast_impl = create_dot, get_bf16, cast_impl
    if plain_fma is not None:
        builder.create_fma = create_fma


def _round(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """The numbers whose bits are in `data`, as bits of another type."""
    shape = data.shape
    bits = torch.from_numpy(np.array(data, copy=True).reshape(-1).view(_signed(source)))
    numbers = bits.view(_TORCH[source])
    if target.primitive_bitwidth == 8:
        limit = torch.finfo(_TORCH[target]).max
        numbers = numbers.float().clamp(-limit, limit)
    rounded = numbers.to(_TORCH[target]).view(_BITS[target.primitive_bitwidth // 8]).numpy()
    return rounded.view(f"uint{target.primitive_bitwidth}").reshape(shape)


def _signed(dtype: tl.dtype) -> str:
    return "uint8" if dtype.primitive_bitwidth == 8 else f"int{dtype.primitive_bitwidth}"


def _widened(handle: _Handle) -> _Handle:
    if handle.dtype.scalar not in _NARROW:
        return handle
    return interpreter.TensorHandle(_round(handle.data, handle.dtype.scalar, tl.float32).view(np.float32), tl.float32)


def _narrowed(handle: _Handle, dtype: tl.dtype) -> _Handle:
    if dtype not in _NARROW or handle.data.dtype == np.bool_:  # a comparison
        return handle
    return interpreter.TensorHandle(
        _round(handle.data, tl.float32, dtype).view(interpreter._get_np_dtype(dtype)), dtype
    )
