"""Op `w8a8_linear`: tokens rounded to int8, and products of whole numbers on matrix units.

One kernel rounds each row as `quire_ops.int8_tokens` says, in float32 and without fused multiply-adds, to the bit; the
other multiplies whole numbers into int32, which is exact, so that a row's result does not depend on its neighbours.

Shape legend: N rows, I inputs, O outputs. BM, BN, BK: rows, outputs and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.targets import Target
from quire_ops import CACHE_TORCH_DTYPES

__all__ = ["byte_tile", "calls", "round_tokens_kernel", "w8a8_kernel", "w8a8_linear"]

_FEW_ROWS = 32


@triton.jit
def round_tokens_kernel(x, input_scale, tokens, steps, size, x_row, BLOCK: tl.constexpr):
    """tokens [N, I] int8 and steps [N] float32 of x [N, I]. A program has a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([], tl.float32)
    odd = tl.zeros([], tl.int32)
    for begin in range(0, size, BLOCK):
        value = tl.load(x + row * x_row + begin + lanes, mask=begin + lanes < size, other=0.0).to(tl.float32)
        is_odd = (value != value) | (tl.abs(value) == float("inf"))
        odd = tl.maximum(odd, tl.max(is_odd.to(tl.int32), 0))
        largest = tl.maximum(largest, tl.max(tl.where(is_odd, 0.0, tl.abs(value)), 0))
    given = tl.load(input_scale)
    all_steps = tl.full([], 127.0, tl.float32)
    step = tl.where(given > 0, given, tl.div_rn(largest, all_steps))
    inverse = tl.where(given > 0, tl.div_rn(tl.full([], 1.0, tl.float32), step), tl.div_rn(all_steps, largest))
    inverse = tl.where((odd == 0) & (inverse < float("inf")), inverse, 0.0)
    for begin in range(0, size, BLOCK):
        value = tl.load(x + row * x_row + begin + lanes, mask=begin + lanes < size, other=0.0).to(tl.float32)
        whole = tl.minimum(tl.maximum(tl.where(odd == 0, value, 0.0) * inverse, -128.0), 127.0)
        whole = (whole + 12582912.0) - 12582912.0  # to the nearest, halves to even
        tl.store(tokens + row * size + begin + lanes, whole.to(tl.int8), mask=begin + lanes < size)
    tl.store(steps + row, tl.where(odd == 0, step, float("nan")))


@triton.jit(do_not_specialize=["num_rows"])
def w8a8_kernel(
    tokens, steps, weight, scale, bias, out, num_rows, num_outputs, inputs,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = (tokens @ weight.T) * steps * scale + bias. Grid: (tiles of rows, tiles of outputs)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_row, inside_col = row < num_rows, col < num_outputs
    total = tl.zeros([BM, BN], tl.int32)
    for begin in range(0, inputs, BK):
        lane = begin + tl.arange(0, BK)
        inside = (lane < inputs)[None, :]
        left = tl.load(tokens + row[:, None] * inputs + lane[None, :], mask=inside_row[:, None] & inside, other=0)
        right = tl.load(weight + col[:, None] * inputs + lane[None, :], mask=inside_col[:, None] & inside, other=0)
        total = tl.dot(left, tl.trans(right), total, out_dtype=tl.int32)
    result = total.to(tl.float32) * tl.load(steps + row, mask=inside_row, other=0.0)[:, None]
    result = result * tl.load(scale + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        result = result + tl.load(bias + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * num_outputs + col[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside_row[:, None] & inside_col[None, :])


def byte_tile(num_rows: int, target: Target) -> dict[str, int]:
    """Tiles of products of bytes. Few rows: narrow pieces of the weight, so that many programs read it; many: wide
    ones, which read less often."""
    stages = 3 if target.vendor == "cuda" else 1
    if num_rows <= _FEW_ROWS:
        return {"BM": 16 if num_rows <= 16 else 32, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": stages}
    if target.has_few_registers:
        return {"BM": 32, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 1}
    return {"BM": 64, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": stages}


def w8a8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    """Op `w8a8_linear`."""
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    (num_rows, inputs), num_outputs = x.shape, weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not out.numel():
        return out
    tokens = torch.empty((num_rows, inputs), dtype=torch.int8, device=x.device)
    steps = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(inputs))
    round_tokens_kernel[(num_rows,)](
        x, input_scale, tokens, steps, inputs, x.stride(0), BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    tile = byte_tile(num_rows, platform.target_of(x.device))
    w8a8_kernel[(triton.cdiv(num_rows, tile["BM"]), triton.cdiv(num_outputs, tile["BN"]))](
        tokens, steps, weight, scale, x if bias is None else bias, out, num_rows, num_outputs, inputs,
        HAS_BIAS=bias is not None, **tile,
    )  # fmt: skip
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Few rows and many."""
    if shape.weights != "int8" or shape.num_experts:
        return
    dtype = CACHE_TORCH_DTYPES[shape.dtype]
    size = shape.hidden_size
    weight = torch.empty(size, size, dtype=torch.int8, device="meta")
    for use, rows in (("few rows", 16), ("many rows", 512)):
        x = torch.empty(rows, size, dtype=dtype, device="meta")
        step = torch.empty(1, dtype=torch.float32, device="meta")
        yield f"{shape.dtype} {use}", partial(w8a8_linear, x, weight, x[0], step, None, platform=platform)
