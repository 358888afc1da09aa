"""Gates of feed-forward networks: an activation of one half times the other half.

Knows elements and the strides of rows: gate and up may be the two halves of one fused projection.

Shape legend: N rows, I elements of a row.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = ["activate", "calls", "gate_kernel", "gelu_and_mul", "sigmoid_and_mul", "silu_and_mul"]

_BLOCK = 1024


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """x float32 -> silu(x), gelu(x) by its tanh approximation, or sigmoid(x)."""
    if ACTIVATION == "silu":
        result = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z); 1.5957691216057308 is 2 * sqrt(2 / pi).
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        result = tl.sigmoid(x)
    return result


@triton.jit
def gate_kernel(gate, up, out, size, gate_row, gate_col, up_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out [N, size] = activation(gate) * up; a program takes a piece of a row. gate_col: 0 where a row has one gate."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < size
    left = tl.load(gate + row * gate_row + col * gate_col, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_row + col, mask=mask, other=0.0).to(tl.float32)
    gated = activate(left, ACTIVATION) * right
    tl.store(out + row * size + col, gated.to(out.dtype.element_ty), mask=mask)


@implements(ops.silu_and_mul)
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gate(gate, up, "silu")


@implements(ops.gelu_and_mul)
def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gate(gate, up, "gelu")


@implements(ops.sigmoid_and_mul)
def sigmoid_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gate(gate, up, "sigmoid")


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Each gate."""
    x = torch.empty(16, shape.intermediate_size, dtype=CACHE_TORCH_DTYPES[shape.dtype], device="meta")
    aligned = "" if shape.intermediate_size % 16 == 0 else " odd"
    for gate in (silu_and_mul, gelu_and_mul, sigmoid_and_mul):
        yield f"{gate.__name__} {shape.dtype}{aligned}", partial(gate, x, x)
    one = torch.empty(16, 1, dtype=x.dtype, device="meta")
    yield f"sigmoid_and_mul one gate {shape.dtype}{aligned}", partial(sigmoid_and_mul, one, x)


def _gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty(up.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        left, right = _rows(gate), _rows(up)
        num_rows, size = right.shape
        gate_col = 0 if left.shape[1] == 1 else 1
        gate_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            left, right, out, size, left.stride(0), gate_col, right.stride(0), ACTIVATION=activation, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """x as [N, I] with neighbouring elements of a row beside each other; a view where that is possible."""
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
