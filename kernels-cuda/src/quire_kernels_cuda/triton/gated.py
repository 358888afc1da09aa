"""Gate and up of a feed-forward network with the gate's activation, few rows in one kernel.

Both products are read from one weight, gate's outputs first, as `MergedLinear` lays them. A program makes the same tile
of both from one tile of the inputs, so the activation needs nothing that another program has, and neither product is
written to memory. Their numbers are rounded to the compute dtype before the activation, as if they had been.

Shape legend: N rows, I inputs, O outputs of gate, and of up. BM, BN, BK: rows, outputs and inputs of a tile.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, LaunchConfig, Platform
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.triton.gates import activate, gelu_and_mul, silu_and_mul
from quire_kernels_cuda.triton.linear import linear
from quire_kernels_cuda.triton.matmul import FEW_ROWS
from quire_ops import CACHE_TORCH_DTYPES, implements, ops

__all__ = ["calls", "gated_linear", "gated_matmul_kernel", "run_gated", "usual_config"]

_GATES = {"silu": silu_and_mul, "gelu": gelu_and_mul}


@triton.jit(do_not_specialize=["num_rows"])
def gated_matmul_kernel(
    x, weight, bias, out, num_rows, num_outputs, inputs, x_row,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [N, O] = activation(x @ weight[:O].T) * (x @ weight[O:].T). Grid: (tiles of rows, tiles of outputs)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    inside_row, inside_col = row < num_rows, col < num_outputs
    gate = tl.zeros([BM, BN], dtype=tl.float32)
    up = tl.zeros([BM, BN], dtype=tl.float32)
    for begin in range(0, inputs, BK):
        lane = begin + tl.arange(0, BK)
        inside = (lane < inputs)[None, :]
        x_tile = tl.load(x + row[:, None] * x_row + lane[None, :], mask=inside_row[:, None] & inside, other=0.0)
        place = weight + col[:, None] * inputs + lane[None, :]
        mask = inside_col[:, None] & inside
        gate = tl.dot(x_tile, tl.trans(tl.load(place, mask=mask, other=0.0)), gate, input_precision="ieee")
        place += tl.cast(num_outputs, tl.int64) * inputs
        up = tl.dot(x_tile, tl.trans(tl.load(place, mask=mask, other=0.0)), up, input_precision="ieee")
    if HAS_BIAS:
        gate = gate + tl.load(bias + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
        up = up + tl.load(bias + num_outputs + col, mask=inside_col, other=0.0).to(tl.float32)[None, :]
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * num_outputs + col[None, :], result, mask=inside_row[:, None] & inside_col[None, :])


@implements(ops.gated_linear)
def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, platform: Platform = NVIDIA
) -> Tensor:
    """A product and a gate, unless one kernel was measured to be faster for this very problem."""
    if x.shape[0] <= FEW_ROWS and x.numel():
        sizes = {"rows": triton.next_power_of_2(x.shape[0]), "outputs": weight.shape[0] // 2, "inputs": x.shape[1]}
        config = platform.config("gated_matmul", x.device, None, sizes=sizes, dtype=x.dtype, activation=activation)
        if config is not None:
            return run_gated(x, weight, bias, activation, config)
    gate, up = linear(x, weight, bias, platform=platform).chunk(2, dim=-1)
    return _GATES[activation](gate, up)


def run_gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: LaunchConfig) -> Tensor:
    """The same in one kernel."""
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    num_rows, num_outputs = x.shape[0], weight.shape[0] // 2
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if out.numel():
        blocks = config.blocks
        gated_matmul_kernel[(triton.cdiv(num_rows, blocks["BM"]), triton.cdiv(num_outputs, blocks["BN"]))](
            x, weight, x if bias is None else bias, out, num_rows, num_outputs, x.shape[1], x.stride(0),
            ACTIVATION=activation, HAS_BIAS=bias is not None, **blocks,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def usual_config(num_rows: int, target: Target) -> LaunchConfig:
    """What is likely to fit a GPU: narrow tiles, of which there are enough without dividing the inputs."""
    blocks = {"BM": 16 if num_rows <= 16 else 32, "BN": 32, "BK": 64}
    if target.has_few_registers:
        return LaunchConfig(blocks=blocks, num_warps=8, num_stages=1)
    return LaunchConfig(blocks=blocks, num_warps=4, num_stages=4 if target.vendor == "cuda" else 2)


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """A decode with each activation."""
    if shape.weights != "plain" or shape.num_experts or shape.latent_rank:
        return
    dtype, device = CACHE_TORCH_DTYPES[shape.dtype], torch.device("meta")
    x = torch.empty(16, shape.hidden_size, dtype=dtype, device=device)
    weight = torch.empty(2 * shape.intermediate_size, shape.hidden_size, dtype=dtype, device=device)
    config = usual_config(16, platform.target_of(device))
    for activation in _GATES:
        yield f"{activation} {shape.dtype}", partial(run_gated, x, weight, None, activation, config)
