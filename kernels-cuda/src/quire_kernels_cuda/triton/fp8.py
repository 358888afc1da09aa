"""Op `fp8_linear`: tokens rounded to fp8 e4m3, and products of 8-bit floats on matrix units that have them.

One kernel rounds tokens as `quire_ops.fp8_tokens` says, to the bit; the other multiplies. Tensor cores of sm_90 add
fewer digits of 8-bit products than float32 has (DeepSeek-AI 2024, DeepSeek-V3, sec. 3.3.2), so each tile of at most 128
inputs is added to the sum apart from them.

Shape legend: N rows, I inputs, O outputs, G groups of 128 inputs. BM, BN, BK: rows, outputs and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.triton.rotary import fp8_bits
from quire_kernels_cuda.triton.w8a8 import byte_tile
from quire_ops import CACHE_TORCH_DTYPES
from quire_ops.fp8_tokens import FP8_GROUP

__all__ = ["calls", "fp8_kernel", "fp8_linear", "round_tokens_to_fp8_kernel"]


@triton.jit
def round_tokens_to_fp8_kernel(
    x, input_scale, tokens, steps, inputs, group, num_groups, x_row, BLOCK: tl.constexpr
):  # fmt: skip
    """tokens [N, I], the bits of e4m3, and steps [N, G] float32 of x [N, I]. A program has a group of a row."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = which * group, tl.minimum(which * group + group, inputs)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([], tl.float32)
    odd = tl.zeros([], tl.int32)
    for begin in range(first, last, BLOCK):
        value = tl.load(x + row * x_row + begin + lanes, mask=begin + lanes < last, other=0.0).to(tl.float32)
        is_odd = (value != value) | (tl.abs(value) == float("inf"))
        odd = tl.maximum(odd, tl.max(is_odd.to(tl.int32), 0))
        largest = tl.maximum(largest, tl.max(tl.where(is_odd, 0.0, tl.abs(value)), 0))
    given = tl.load(input_scale)
    step = tl.where(given > 0, given, tl.div_rn(largest, tl.full([], 448.0, tl.float32)))
    usable = (odd == 0) & (step > 0)
    divisor = tl.broadcast_to(tl.where(usable, step, 1.0), (BLOCK,))
    for begin in range(first, last, BLOCK):
        value = tl.load(x + row * x_row + begin + lanes, mask=begin + lanes < last, other=0.0).to(tl.float32)
        scaled = tl.div_rn(tl.where(usable, value, 0.0), divisor)
        bits = fp8_bits(tl.minimum(tl.maximum(scaled, -448.0), 448.0), 3, 7)
        tl.store(tokens + row * inputs + begin + lanes, bits, mask=begin + lanes < last)
    tl.store(steps + row * num_groups + which, tl.where(odd == 0, step, float("nan")))


@triton.jit(do_not_specialize=["num_rows"])
def fp8_kernel(
    tokens, steps, weight, scale, bias, out, num_rows, num_outputs, inputs, num_groups,
    GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = (tokens * steps) @ (weight * scale).T + bias. Grid: (tiles of rows, tiles of outputs).

    GROUPED: steps and scales are those of BK inputs.
    """
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_row, inside_col = row < num_rows, col < num_outputs
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, inputs, BK):
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
    place = row[:, None] * num_outputs + col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside_row[:, None] & inside_col[None, :])


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    """Op `fp8_linear`."""
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    (num_rows, inputs), num_outputs, num_groups = x.shape, weight.shape[0], scale.shape[1]
    out = torch.empty((num_rows, num_outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not out.numel():
        return out
    tokens = torch.empty((num_rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    steps = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    group = inputs if num_groups == 1 else FP8_GROUP
    round_tokens_to_fp8_kernel[(num_rows, num_groups)](
        x, input_scale, tokens.view(torch.uint8), steps, inputs, group, num_groups, x.stride(0),
        BLOCK=min(4096, triton.next_power_of_2(group)), num_warps=1 if num_groups > 1 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    tile = byte_tile(num_rows, platform.target_of(x.device)) | {"BK": FP8_GROUP}
    fp8_kernel[(triton.cdiv(num_rows, tile["BM"]), triton.cdiv(num_outputs, tile["BN"]))](
        tokens, steps, weight, scale.contiguous(), x if bias is None else bias, out, num_rows, num_outputs, inputs,
        num_groups, GROUPED=num_groups > 1, HAS_BIAS=bias is not None, **tile,
    )  # fmt: skip
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Few rows and many, scales of outputs and of groups, on GPUs that multiply 8-bit floats."""
    device = torch.device("meta")
    if shape.weights != "fp8" or shape.num_experts or not platform.target_of(device).has_fp8:
        return
    dtype, size = CACHE_TORCH_DTYPES[shape.dtype], shape.hidden_size
    weight = torch.empty(size, size, dtype=torch.float8_e4m3fn, device=device)
    given = torch.empty(1, dtype=torch.float32, device=device)
    for use, rows in (("few rows", 16), ("many rows", 512)):
        x = torch.empty(rows, size, dtype=dtype, device=device)
        for scales, groups in (("", 1), (" grouped", -(-size // FP8_GROUP))):
            scale = torch.empty(size, groups, dtype=torch.float32, device=device)
            call = partial(fp8_linear, x, weight, scale, given, None, platform=platform)
            yield f"{shape.dtype} {use}{scales}", call
