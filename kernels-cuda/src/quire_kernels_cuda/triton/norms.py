"""Norms over the last dimension: RMS norm, with the addition of a residual before it, and layer norm.

A program takes a tile of whole rows, so that short rows (heads) fill it as well as long ones. Everything is summed in
float32. Knows shapes and strides; does not know layers.

Shape legend: N rows, H heads of a row, I elements that are normalised together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = [
    "MAX_SIZE",
    "add_rms_norm",
    "calls",
    "layer_norm",
    "layer_norm_kernel",
    "normed_rows",
    "rms_norm",
    "rms_norm_kernel",
    "row_tiles",
]

MAX_SIZE = 32768
"""Elements of a row that a program holds in its registers."""
_TILE = 2048


@triton.jit
def normed_rows(x, residual, weight, row, col, mask, size, x_begins, residual_row, eps, ADD: tl.constexpr):
    """norm(x) of some rows [R, C], float32; with ADD, residual becomes x + residual, and that is normalised.

    x_begins [R]: where rows of x begin.
    """
    value = tl.load(x + x_begins[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = row[:, None] * residual_row + col[None, :]
        total = (value + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + place, total, mask=mask)
        value = total.to(tl.float32)
    mean_square = tl.sum(value * value, axis=1) / size
    factor = 1.0 / tl.sqrt(mean_square + eps)
    gain = tl.load(weight + col, mask=col < size, other=0.0).to(tl.float32)
    return value * factor[:, None] * gain[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x, residual, weight, out,
    num_rows, heads, size, x_row, x_head, residual_row, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out [N, size] = norm(x); with ADD, residual becomes x + residual, and that is normalised."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < size)[None, :]
    x_begins = (row // heads) * x_row + (row % heads) * x_head
    normed = normed_rows(x, residual, weight, row, col, mask, size, x_begins, residual_row, eps, ADD)
    tl.store(out + row[:, None] * size + col[None, :], normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    x, weight, bias, out,
    num_rows, size, x_row, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out [N, size]: the mean first, then the squares of what is left, so that no digits cancel."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (col < size)[None, :]
    value = tl.load(x + row[:, None] * x_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1) / size
    centred = tl.where(mask, value - mean[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / size + eps)
    normed = centred * factor[:, None]
    if HAS_WEIGHT:
        normed = normed * tl.load(weight + col, mask=col < size, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        normed = normed + tl.load(bias + col, mask=col < size, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * size + col[None, :], normed.to(out.dtype.element_ty), mask=mask)


@implements(ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Op `rms_norm`. Heads may be apart in memory, as views of a fused projection are."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = weight.shape[0]
    heads = x.shape[1] if x.ndim == 3 else 1
    if x.ndim not in (2, 3) or x.stride(-1) != 1:
        x, heads = x.contiguous().view(-1, size), 1
    num_rows = out.numel() // size
    if num_rows:
        x_head = x.stride(1) if heads > 1 or x.ndim == 3 else 0
        grid, options = row_tiles(num_rows, size)
        rms_norm_kernel[grid](
            x, x, weight, out, num_rows, heads, size, x.stride(0), x_head, 0, eps, ADD=False, **options
        )
    return out


@implements(ops.add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum is written over `residual`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        grid, options = row_tiles(num_rows, size)
        rms_norm_kernel[grid](
            x, residual, weight, out, num_rows, 1, size, x.stride(0), 0, residual.stride(0), eps, ADD=True, **options
        )
    return out, residual


@implements(ops.layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.ndim == 2 and x.stride(-1) == 1 else x.contiguous().view(-1, size)
    if out.numel():
        grid, options = row_tiles(rows.shape[0], size)
        layer_norm_kernel[grid](
            rows, rows if weight is None else weight, rows if bias is None else bias, out,
            rows.shape[0], size, rows.stride(0), eps,
            HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **options,
        )  # fmt: skip
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Norms of hidden states, and of heads."""
    dtype = CACHE_TORCH_DTYPES[shape.dtype]
    x = torch.empty(64, shape.hidden_size, dtype=dtype, device="meta")
    heads = torch.empty(64, shape.num_heads, shape.head_dim, dtype=dtype, device="meta")
    label = f"{shape.dtype} {shape.hidden_size}"
    yield label, lambda: rms_norm(x, x[0], 1e-6)
    yield f"{label} with residual", lambda: add_rms_norm(x, x, x[0], 1e-6)
    yield f"{label} with weight and bias", lambda: layer_norm(x, x[0], x[0], 1e-6)
    yield f"{shape.dtype} heads of {shape.head_dim}", lambda: rms_norm(heads, heads[0, 0], 1e-6)


def row_tiles(num_rows: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid, and the tile: about `_TILE` elements in short rows, one row otherwise."""
    block = triton.next_power_of_2(size)
    rows = min(max(1, _TILE // block), triton.next_power_of_2(num_rows))
    num_warps = min(16, max(4, rows * block // 1024))
    return (triton.cdiv(num_rows, rows),), {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}
