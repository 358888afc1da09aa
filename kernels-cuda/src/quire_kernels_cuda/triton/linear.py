"""Linear layers: few rows through our own kernels where a measurement says so, everything else through torch.

Knows which function takes a product; the kernels are in `matmul.py`.

Shape legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import NVIDIA, Platform
from quire_kernels_cuda.triton.matmul import FEW_ROWS, MatmulTile, run_matmul
from quire_ops import CACHE_TORCH_DTYPES, implements, ops
from quire_ops.grouped import block_groups
from quire_ops.linear_ops import torch_lm_head

__all__ = ["calls", "grouped_linear", "int8_linear", "linear", "lm_head"]


@implements(ops.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, platform: Platform = NVIDIA) -> Tensor:
    """Torch's product, unless ours was measured to be faster for this number of rows and this weight."""
    if x.shape[0] <= FEW_ROWS and x.numel():
        rows = triton.next_power_of_2(x.shape[0])
        sizes = {"rows": rows, "outputs": weight.shape[0], "inputs": weight.shape[1]}
        config = platform.config("skinny_matmul", x.device, None, sizes=sizes, dtype=x.dtype)
        if config is not None:
            return run_matmul(x, weight, form="plain", bias=bias, out_dtype=x.dtype, tile=MatmulTile.of(config))
    return F.linear(x, weight, bias)


@implements(ops.lm_head)
def lm_head(x: Tensor, weight: Tensor, *, platform: Platform = NVIDIA) -> Tensor:
    """Written as wide as it is summed, for any number of rows: a draw does not depend on how many others there are."""
    if x.shape[0] > FEW_ROWS and x.is_cuda and torch.version.hip is None:
        return torch_lm_head(x, weight)
    return run_matmul(x, weight, form="plain", out_dtype=torch.float32, platform=platform)


@implements(ops.int8_linear)
def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    dtype = torch.float32 if wide else x.dtype
    return run_matmul(x, weight, form="int8", scale=scale, bias=bias, out_dtype=dtype, platform=platform)


@implements(ops.grouped_linear)
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    *,
    wide: bool = False,
    platform: Platform = NVIDIA,
) -> Tensor:
    form = {torch.uint8: "int4", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(weight.dtype)
    if form is None:
        raise ConfigError(f"weights in groups are uint8, int8 or float8_e4m3fn, not {weight.dtype}")
    dtype = torch.float32 if wide else x.dtype
    return run_matmul(x, weight, form=form, scale=scale, zero=zero, bias=bias, out_dtype=dtype, platform=platform)


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Logits, and products with the network's form of weights, of few rows (with splits and without) and of many; of
    one with int4 weights."""
    dtype = CACHE_TORCH_DTYPES[shape.dtype]

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    inputs = shape.hidden_size
    if shape.weights == "plain":
        x, weight = empty(16, inputs), empty(shape.vocab_size, inputs)
        yield f"logits {shape.dtype} {inputs}", lambda: lm_head(x, weight, platform=platform)
        return
    kinds = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    if shape.weights not in kinds:
        return
    kind = kinds[shape.weights]
    label = f"{shape.weights} {shape.dtype}"
    uses = [("few rows", 16, 65536), ("few rows split", 16, inputs // 4), ("many rows", 512, inputs)]
    for use, rows, outputs in uses + [("one row", 1, inputs)] * (shape.weights == "int4"):
        x = empty(rows, inputs)
        if shape.weights == "int8":
            weight, scale = empty(outputs, inputs, dtype=kind), empty(outputs)
            yield f"{label} {use}", partial(int8_linear, x, weight, scale, None, platform=platform)
        else:
            width = inputs // 2 if shape.weights == "int4" else inputs
            weight, scale = empty(outputs, width, dtype=kind), block_groups(empty(outputs, inputs // 128))
            yield f"{label} {use}", partial(grouped_linear, x, weight, scale, None, None, platform=platform)
