"""Products of whole numbers on matrix units, of tokens rounded to int8 (`rounding.py`).

They are summed in int32, which is exact, so that a row's result does not depend on its neighbours.

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
from quire_kernels_cuda.triton.rounding import round_rows
from quire_ops import CACHE_TORCH_DTYPES, ActivationScheme, QuantizedTokens, implements, ops

__all__ = ["byte_tile", "calls", "w8a8_kernel", "w8a8_linear"]

_FEW_ROWS = 32


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


@implements(ops.w8a8_linear)
def w8a8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    tokens, steps, dtype = (
        x if isinstance(x, QuantizedTokens) else round_rows(x, ActivationScheme(torch.int8, input_scale))
    )
    weight = weight.contiguous()
    (num_rows, inputs), num_outputs = tokens.shape, weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=torch.float32 if wide else dtype, device=tokens.device)
    if not out.numel():
        return out
    tile = byte_tile(num_rows, platform.target_of(tokens.device))
    w8a8_kernel[(triton.cdiv(num_rows, tile["BM"]), triton.cdiv(num_outputs, tile["BN"]))](
        tokens, steps, weight, scale, out if bias is None else bias, out, num_rows, num_outputs, inputs,
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
