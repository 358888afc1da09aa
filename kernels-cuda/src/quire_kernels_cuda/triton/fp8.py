"""Products of 8-bit floats on matrix units that have them, of tokens rounded to e4m3 (`rounding.py`); of many rows, in
bfloat16, by torch's library where it serves.

Tensor cores of sm_90 add fewer digits of 8-bit products than float32 has (DeepSeek-AI 2024, DeepSeek-V3, sec. 3.3.2),
so each tile of at most 128 inputs is added to the sum apart from them. Where too few tiles keep a GPU busy, inputs are
divided among several programs (split-K), whose float32 parts `add_splits_kernel` adds in a fixed order.

Shape legend: N rows, I inputs, O outputs, G groups of 128 inputs. BM, BN, BK: rows, outputs and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda import library_products
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.triton.matmul import add_splits_kernel
from quire_kernels_cuda.triton.rounding import round_rows
from quire_kernels_cuda.triton.w8a8 import byte_splits, byte_tile, many_rows_tile
from quire_ops import CACHE_TORCH_DTYPES, ActivationScheme, QuantizedTokens, implements, ops
from quire_ops.activation_quant import FP8_GROUP

__all__ = ["calls", "fp8_kernel", "fp8_linear"]


@triton.jit(do_not_specialize=["num_rows"])
def fp8_kernel(
    tokens, steps, weight, scale, bias, out, num_rows, num_outputs, inputs, num_groups, split_inputs,
    GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = (tokens * steps) @ (weight * scale).T + bias; with several splits parts of it [NUM_SPLITS, N, O].

    Grid: (tiles of rows, tiles of outputs, splits of `split_inputs` inputs, whole groups).
    GROUPED: steps and scales are those of BK inputs.
    """
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_row, inside_col = row < num_rows, col < num_outputs
    total = tl.zeros([BM, BN], tl.float32)
    first = tl.program_id(2) * split_inputs
    for begin in range(first, tl.minimum(first + split_inputs, inputs), BK):
        lane = begin + tl.arange(0, BK)
        inside = (lane < inputs)[None, :]
        left = tl.load(tokens + row[:, None] * inputs + lane[None, :], mask=inside_row[:, None] & inside, other=0.0)
        right = tl.load(weight + col[:, None] * inputs + lane[None, :], mask=inside_col[:, None] & inside, other=0.0)
        part = tl.dot(left, tl.trans(right))
        if GROUPED:
            group = begin // BK
            part = part * tl.load(steps + row * num_groups + group, mask=inside_row, other=0.0)[:, None]
            part = part * tl.load(scale + col * num_groups + group, mask=inside_col, other=0.0)[None, :]
        total += part
    if not GROUPED:
        total = total * tl.load(steps + row, mask=inside_row, other=0.0)[:, None]
        total = total * tl.load(scale + col, mask=inside_col, other=0.0)[None, :]
    if HAS_BIAS:
        total = total + tl.load(bias + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
    place = (tl.program_id(2).to(tl.int64) * num_rows + row)[:, None] * num_outputs + col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside_row[:, None] & inside_col[None, :])


@implements(ops.fp8_linear)
def fp8_linear(
    x: Tensor | QuantizedTokens,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    num_outputs, num_groups = scale.shape
    rounding = ActivationScheme(torch.float8_e4m3fn, input_scale, by_group=num_groups > 1)
    tokens, steps, dtype = x if isinstance(x, QuantizedTokens) else round_rows(x, rounding)
    num_rows, inputs = tokens.shape
    out = torch.empty((num_rows, num_outputs), dtype=torch.float32 if wide else dtype, device=tokens.device)
    if not out.numel():
        return out
    weight = weight.contiguous()
    form = "fp8" if num_groups == 1 else "fp8-groups"
    tile: dict[str, int] | None = None
    if out.dtype == torch.bfloat16 and (bias is None or num_groups == 1):  # as libraries write
        tile = many_rows_tile(form, num_rows, num_outputs, inputs, tokens.device, dtype, platform)
        if tile is None and (found := library_products.fp8_product(tokens, steps, weight, scale, bias)) is not None:
            return found
    tile = (tile or byte_tile(num_rows, platform.target_of(tokens.device))) | {"BK": FP8_GROUP}
    split_inputs = byte_splits(num_rows, num_outputs, inputs, tile, tokens.device)
    splits, parts = triton.cdiv(inputs, split_inputs), out
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=tokens.device)
    given = out if bias is None else bias
    fp8_kernel[(triton.cdiv(num_rows, tile["BM"]), triton.cdiv(num_outputs, tile["BN"]), splits)](
        tokens, steps, weight, scale.contiguous(), given, parts, num_rows, num_outputs, inputs,
        num_groups, split_inputs, GROUPED=num_groups > 1, HAS_BIAS=bias is not None and splits == 1, **tile,
    )  # fmt: skip
    if splits > 1:
        add_splits_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, parts, given, out, out.numel(), num_outputs,
            NUM_SPLITS=splits, HAS_SCALE=False, HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Few rows, with splits and without, and many, scales of outputs and of groups, on GPUs that multiply 8-bit
    floats."""
    device = torch.device("meta")
    if shape.weights != "fp8" or shape.num_experts or not platform.target_of(device).has_fp8:
        return
    dtype, size = CACHE_TORCH_DTYPES[shape.dtype], shape.hidden_size
    given = torch.empty(1, dtype=torch.float32, device=device)
    split = (("few rows split", 16, size // 4), ("64 rows split", 64, size // 4))
    for use, rows, outputs in (("few rows", 16, 65536), *split, ("many rows", 512, size)):
        x = torch.empty(rows, size, dtype=dtype, device=device)
        weight = torch.empty(outputs, size, dtype=torch.float8_e4m3fn, device=device)
        for scales, groups in (("", 1), (" grouped", -(-size // FP8_GROUP))):
            scale = torch.empty(outputs, groups, dtype=torch.float32, device=device)
            call = partial(fp8_linear, x, weight, scale, given, None, platform=platform)
            yield f"{shape.dtype} {use}{scales}", call
