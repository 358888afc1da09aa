"""Products of one row with what stands before and behind them in a decoder layer: a norm, a gate, the residual.

One request's decode is bound by reading weights, and by what its launches take to start and to drain. A program makes a
few outputs from all inputs, with as many loads of 16 bytes under way as hide the memory's latency, and without matrix
units, of whose tile 15 rows would be padding. The norm costs no launch and no pass: its factor is the same for all
inputs, so that it is multiplied to the sum, and each program sums the squares of the inputs that it reads anyway.

Shape legend: N rows, I inputs, O outputs. BN, BK: outputs and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, Platform, num_multiprocessors
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.gates import activate
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = ["calls", "linear_add", "norm_linear", "row_config", "row_linear_kernel"]


@triton.jit
def row_linear_kernel(
    x, gain, weight, bias, residual, out, num_outputs, inputs, x_row, residual_row, eps,
    HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_WHOLE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """out [N, O] = residual + norm(x) @ weight.T + bias, or with an ACTIVATION the gate of its two halves.

    Grid: (tiles of outputs, rows). Everything is summed in float32.

    Args:
        weight: [O, I]; with an ACTIVATION [2 * O, I], gate's outputs first, and bias likewise.
        ACTIVATION: "none", or a name that `activate` knows.
        IS_WHOLE: Tiles are whole.
    """
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    inside_out = outputs < num_outputs
    lane = tl.arange(0, BK)
    place = weight + outputs.to(tl.int64)[:, None] * inputs + lane[None, :]
    up_place = place + tl.cast(num_outputs, tl.int64) * inputs
    x += row * x_row
    total = tl.zeros([BN, BK], tl.float32)
    up_total = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for begin in tl.range(0, inputs, BK, num_stages=NUM_STAGES):
        if IS_WHOLE:
            tile = tl.load(place + begin)
            numbers = tl.load(x + begin + lane).to(tl.float32)
        else:
            inside = begin + lane < inputs
            mask = inside_out[:, None] & inside[None, :]
            tile = tl.load(place + begin, mask=mask, other=0.0)
            numbers = tl.load(x + begin + lane, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION != "none":
            if IS_WHOLE:
                up_tile = tl.load(up_place + begin)
            else:
                up_tile = tl.load(up_place + begin, mask=mask, other=0.0)
        if HAS_NORM:
            squares += numbers * numbers
            if IS_WHOLE:
                numbers *= tl.load(gain + begin + lane).to(tl.float32)
            else:
                numbers *= tl.load(gain + begin + lane, mask=inside, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * numbers[None, :]
        if ACTIVATION != "none":
            up_total += up_tile.to(tl.float32) * numbers[None, :]
    factor = 1.0
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / inputs + eps)
    result = tl.sum(total, 1) * factor
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=inside_out, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        up = tl.sum(up_total, 1) * factor
        if HAS_BIAS:
            up += tl.load(bias + num_outputs + outputs, mask=inside_out, other=0.0).to(tl.float32)
        # Rounded as if they had been written.
        result = activate(result.to(out.dtype.element_ty).to(tl.float32), ACTIVATION)
        result *= up.to(out.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        result += tl.load(residual + row * residual_row + outputs, mask=inside_out, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + outputs, result.to(out.dtype.element_ty), mask=inside_out)


def row_config(
    num_outputs: int, inputs: int, *, gated: bool, dtype: torch.dtype, device: torch.device, target: Target
) -> LaunchConfig:
    """Three programs for each multiprocessor or more, and 8 KiB of weights, the gate's and up's together, in a turn."""
    outputs = 4 if gated else 8
    while outputs > 2 and triton.cdiv(num_outputs, outputs) < 3 * num_multiprocessors(device):
        outputs //= 2
    tile = min(1024 // dtype.itemsize, triton.next_power_of_2(inputs))  # of a row, two warps' loads of 16 bytes
    while outputs * tile * dtype.itemsize * (1 + gated) < 8192 and inputs % (2 * tile) == 0:
        tile *= 2
    stages = 1 if target.has_few_registers else 3 if target.vendor == "cuda" else 2
    return LaunchConfig(blocks={"BN": outputs, "BK": tile}, num_warps=4, num_stages=stages)


@implements(ops.norm_linear)
def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    platform: Platform = NVIDIA,
) -> Tensor:
    """Reads the weight for each row anew."""
    return _launch(x, weight, bias, norm=(norm_weight, eps), activation=activation, platform=platform)


@implements(ops.linear_add)
def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, *, platform: Platform = NVIDIA
) -> Tensor:
    """Reads the weight for each row anew."""
    return _launch(x, weight, bias, residual=residual, platform=platform)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: tuple[Tensor, float] | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    platform: Platform,
) -> Tensor:
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    num_rows, inputs = x.shape
    num_outputs = weight.shape[0] // (2 if activation else 1)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    config = row_config(
        num_outputs, inputs, gated=activation is not None, dtype=x.dtype, device=x.device,
        target=platform.target_of(x.device),
    )  # fmt: skip
    blocks = config.blocks
    absent = x  # stands where there is nothing: never read
    row_linear_kernel[(triton.cdiv(num_outputs, blocks["BN"]), num_rows)](
        x, absent if norm is None else norm[0], weight, absent if bias is None else bias,
        absent if residual is None else residual, out, num_outputs, inputs, x.stride(0),
        0 if residual is None else residual.stride(0), 0.0 if norm is None else norm[1],
        HAS_NORM=norm is not None, ACTIVATION=activation or "none", HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_WHOLE=num_outputs % blocks["BN"] == 0 and inputs % blocks["BK"] == 0, **blocks,
        NUM_STAGES=config.num_stages, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """A layer's products of one row."""
    if shape.weights != "plain" or shape.num_experts or shape.latent_rank:
        return
    empty = partial(torch.empty, dtype=CACHE_TORCH_DTYPES[shape.dtype], device="meta")
    x, hidden = empty(1, shape.hidden_size), shape.hidden_size
    gates, label = empty(2 * shape.intermediate_size, hidden), f"{shape.dtype} {shape.hidden_size}"
    yield f"{label} norm", partial(norm_linear, x, x[0], 1e-6, empty(hidden, hidden), None, None, platform=platform)
    yield f"{label} norm and silu", partial(norm_linear, x, x[0], 1e-6, gates, None, "silu", platform=platform)
    yield f"{label} residual", partial(linear_add, x, empty(hidden, hidden), None, x, platform=platform)
