"""Tokens rounded for products of 8-bit numbers: alone, behind a norm, behind a gate.

All of it as `quire_ops.activation_quant` says, to the bit: no product of theirs is added to
anything, so fused multiply-adds change nothing. What stands before the scheme is rounded to the compute dtype first,
as if it had been in memory, so that one kernel gives what two would.

Shape legend: N rows, I inputs, G groups of a row.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.triton.gates import activate
from quire_kernels_cuda.triton.norms import normed_rows, row_tiles
from quire_kernels_cuda.triton.rotary import fp8_bits
from quire_ops import CACHE_TORCH_DTYPES, ActivationScheme, QuantizedTokens, implements, ops
from quire_ops.activation_quant import FP8_GROUP

__all__ = [
    "add_rms_norm_quant",
    "add_rms_norm_quant_kernel",
    "calls",
    "gate_quant",
    "round_rows",
    "round_rows_kernel",
]

_BLOCK = 4096


@triton.jit
def _is_odd(value):
    return (value != value) | (tl.abs(value) == float("inf"))


@triton.jit
def _step_of(largest, is_finite, given, INT8: tl.constexpr):
    """(step, whether numbers can be divided by it, factor for `_rounded`) of groups with numbers up to `largest`.

    given: The step of every group; or 0.
    """
    zero = tl.zeros_like(largest)
    if INT8:
        step = tl.where(given > 0, given, tl.div_rn(largest, zero + 127.0))
        factor = tl.where(given > 0, tl.div_rn(zero + 1.0, zero + given), tl.div_rn(zero + 127.0, largest))
        usable = is_finite & (factor < float("inf"))
    else:
        step = tl.where(given > 0, given, tl.div_rn(largest, zero + 448.0))
        factor = step
        usable = is_finite & (step > 0)
    return tl.where(is_finite, step, float("nan")), usable, tl.where(usable, factor, 1.0)


@triton.jit
def _rounded(value, usable, factor, INT8: tl.constexpr):
    """Whole numbers value * factor, or the bits of value / factor in e4m3; zeros where they cannot be divided."""
    value = tl.where(usable, value, 0.0)
    if INT8:
        whole = tl.minimum(tl.maximum(value * factor, -128.0), 127.0)
        result = ((whole + 12582912.0) - 12582912.0).to(tl.int8)  # to the nearest, halves to even
    else:
        scaled = tl.div_rn(value, tl.zeros_like(value) + factor)
        result = fp8_bits(tl.minimum(tl.maximum(scaled, -448.0), 448.0), 3, 7)
    return result


@triton.jit
def _load_gated(x, up, x_place, up_place, mask, ACTIVATION: tl.constexpr):
    """float32 of x, or of activation(x) * up in the dtype of x."""
    value = tl.load(x + x_place, mask=mask, other=0.0)
    if ACTIVATION != "":
        other = tl.load(up + up_place, mask=mask, other=0.0).to(tl.float32)
        value = (activate(value.to(tl.float32), ACTIVATION) * other).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def round_rows_kernel(
    x, up, input_scale, tokens, steps, inputs, group, num_groups, x_row, up_row,
    ACTIVATION: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens [N, I] and steps [N, G] of x [N, I], or with ACTIVATION of activation(x) * up. A program has a group of a
    row; it goes through it twice."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = which * group, tl.minimum(which * group + group, inputs)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([], tl.float32)
    odd = tl.zeros([], tl.int32)
    for begin in range(first, last, BLOCK):
        col = begin + lanes
        value = _load_gated(x, up, row * x_row + col, row * up_row + col, col < last, ACTIVATION)
        is_odd = _is_odd(value)
        odd = tl.maximum(odd, tl.max(is_odd.to(tl.int32), 0))
        largest = tl.maximum(largest, tl.max(tl.where(is_odd, 0.0, tl.abs(value)), 0))
    step, usable, factor = _step_of(largest, odd == 0, tl.load(input_scale), INT8)
    for begin in range(first, last, BLOCK):
        col = begin + lanes
        value = _load_gated(x, up, row * x_row + col, row * up_row + col, col < last, ACTIVATION)
        tl.store(tokens + row * inputs + col, _rounded(value, usable, factor, INT8), mask=col < last)
    tl.store(steps + row * num_groups + which, step)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_quant_kernel(
    x, residual, weight, input_scale, tokens, steps, num_rows, size, num_groups, x_row, residual_row, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """residual [N, I] becomes x + residual; tokens [N, I] and steps [N, G] are those of its norm. A program has ROWS
    rows, GROUP numbers in a group."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < size)[None, :]
    normed = normed_rows(x, residual, weight, row, col, mask, size, row * x_row, residual_row, eps, True)
    value = tl.where(mask, normed.to(x.dtype.element_ty).to(tl.float32), 0.0)
    value = tl.reshape(value, (ROWS, BLOCK // GROUP, GROUP))
    is_odd = _is_odd(value)
    largest = tl.max(tl.where(is_odd, 0.0, tl.abs(value)), 2)
    step, usable, factor = _step_of(largest, tl.max(is_odd.to(tl.int32), 2) == 0, tl.load(input_scale), INT8)
    bits = tl.reshape(_rounded(value, usable[:, :, None], factor[:, :, None], INT8), (ROWS, BLOCK))
    tl.store(tokens + row[:, None] * size + col[None, :], bits, mask=mask)
    which = tl.arange(0, BLOCK // GROUP)
    inside = (row < num_rows)[:, None] & (which < num_groups)[None, :]
    tl.store(steps + row[:, None] * num_groups + which[None, :], step, mask=inside)


def round_rows(x: Tensor, scheme: ActivationScheme, up: Tensor | None = None, activation: str = "") -> QuantizedTokens:
    """x [N, I] rounded, or with `up` [N, I] activation(x) * up."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    other = x if up is None else up if up.stride(-1) == 1 else up.contiguous()
    num_rows, inputs = x.shape
    rounded, group = _empty(x, scheme)
    tokens, steps, _ = rounded
    if not tokens.numel():
        return rounded
    num_groups = triton.cdiv(inputs, group)
    round_rows_kernel[(num_rows, num_groups)](
        x, other, scheme.input_scale, _bytes(tokens), steps, inputs, group, num_groups, x.stride(0), other.stride(0),
        ACTIVATION=activation, INT8=scheme.dtype == torch.int8, BLOCK=min(_BLOCK, triton.next_power_of_2(group)),
        num_warps=1 if num_groups > 1 else 4,
    )  # fmt: skip
    return rounded


@implements(ops.gate_quant)
def gate_quant(gate: Tensor, up: Tensor, activation: str, scheme: ActivationScheme) -> QuantizedTokens:
    return round_rows(gate, scheme, up, activation)


@implements(ops.add_rms_norm_quant)
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scheme: ActivationScheme
) -> tuple[QuantizedTokens, Tensor]:
    """The sum is written over `residual`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    num_rows, size = x.shape
    rounded, group = _empty(x, scheme)
    tokens, steps, _ = rounded
    if num_rows:
        grid, options = row_tiles(num_rows, size)
        num_groups = triton.cdiv(size, group)
        add_rms_norm_quant_kernel[grid](
            x, residual, weight, scheme.input_scale, _bytes(tokens), steps, num_rows, size, num_groups, x.stride(0),
            residual.stride(0), eps, GROUP=group if num_groups > 1 else options["BLOCK"],
            INT8=scheme.dtype == torch.int8, **options,
        )  # fmt: skip
    return rounded, residual


def _empty(x: Tensor, scheme: ActivationScheme) -> tuple[QuantizedTokens, int]:
    """Memory for x [N, I] rounded, and how many numbers are in a group."""
    num_rows, inputs = x.shape
    group = FP8_GROUP if scheme.by_group else inputs
    shape = (num_rows,) if scheme.dtype == torch.int8 else (num_rows, -(-inputs // group))
    tokens = torch.empty((num_rows, inputs), dtype=scheme.dtype, device=x.device)
    return QuantizedTokens(tokens, torch.empty(shape, dtype=torch.float32, device=x.device), x.dtype), group


def _bytes(tokens: Tensor) -> Tensor:
    return tokens if tokens.dtype == torch.int8 else tokens.view(torch.uint8)


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Alone, behind a norm and behind each gate, in every form of the weights that are rounded for."""
    device = torch.device("meta")
    forms = {"int8": ((torch.int8, False),), "fp8": ((torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True))}
    if shape.num_experts or (shape.weights == "fp8" and not platform.target_of(device).has_fp8):
        return
    dtype, scale = CACHE_TORCH_DTYPES[shape.dtype], torch.empty(1, dtype=torch.float32, device=device)
    x = torch.empty(64, shape.hidden_size, dtype=dtype, device=device)
    inner = torch.empty(16, shape.intermediate_size, dtype=dtype, device=device)
    for to, by_group in forms.get(shape.weights, ()):
        scheme = ActivationScheme(to, scale, by_group)
        label = f"{shape.weights} {shape.dtype}{' grouped' if by_group else ''}"
        yield f"{label} {shape.hidden_size}", partial(round_rows, x, scheme)
        yield f"{label} {shape.hidden_size}", partial(add_rms_norm_quant, x, x, x[0], 1e-6, scheme)
        for activation in ("silu", "gelu"):
            yield f"{label} {activation}", partial(gate_quant, inner, inner, activation, scheme)
