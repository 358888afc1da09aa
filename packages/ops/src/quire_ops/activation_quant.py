"""Inputs of linear layers quantized before the product, to int8 or fp8 e4m3: the two rules, and the ops that quantize
what they compute, once for every layer that takes the same inputs.

Knows the rules; does not know weights. Shape legend: N rows, I inputs, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.activations import GATED_ACTIVATIONS
from quire_ops.norms import add_rms_norm
from quire_ops.op import op

__all__ = [
    "FP8_GROUP",
    "ActivationScheme",
    "QuantizedTokens",
    "add_rms_norm_quant",
    "gate_quant",
    "quantize_fp8",
    "quantize_int8",
    "quantize_tokens",
]

FP8_MAX = 448.0
"""Largest finite number of e4m3."""
FP8_GROUP = 128
"""Inputs of a group (DeepSeek-AI 2024, DeepSeek-V3, sec. 3.3.2)."""


class ActivationScheme(NamedTuple):
    """How a product quantizes its inputs."""

    dtype: torch.dtype
    """int8, as op `w8a8_linear` takes them, or float8_e4m3fn, as op `fp8_linear` does."""
    input_scale: Tensor
    """[1] float32, the scale of every row; 0 where each row, or group, has its own (dynamic)."""
    by_group: bool = False
    """Whether each 128 inputs have a scale of their own, which only fp8 has."""


class QuantizedTokens(NamedTuple):
    """Rows that are quantized already. Ops `w8a8_linear` and `fp8_linear` take them in the place of x [N, I]."""

    tokens: Tensor
    """[N, I] int8 or float8_e4m3fn."""
    scales: Tensor
    """What the tokens' numbers are multiples of: of int8 [N], of fp8 [N, G] float32; G is ceil(I / 128) by group, else
    1."""
    dtype: torch.dtype
    """What the rows were before, and what a product of them is."""


def quantize_tokens(x: Tensor | QuantizedTokens, scheme: ActivationScheme) -> QuantizedTokens:
    """x [N, I] quantized, unless it is already."""
    if isinstance(x, QuantizedTokens):
        return x
    if scheme.dtype == torch.int8:
        return QuantizedTokens(*quantize_int8(x, scheme.input_scale), x.dtype)
    return QuantizedTokens(*quantize_fp8(x, scheme.input_scale, by_group=scheme.by_group), x.dtype)


def quantize_int8(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rows -> integers and the scale of each row; computed in float32.

    Args:
        x: [N, I].
        input_scale: [1] float32, the scale of every row; or 0, then a row's is its largest magnitude / 127.

    Returns:
        [N, I] int8: x / scale, rounded to nearest even, from -128 to 127; zeros where the scale is too small for its
        inverse. And the scales [N] float32: NaN for a row with something that is not finite.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1)
    finite = largest < torch.inf
    if float(input_scale) > 0:
        scale = input_scale.float().expand(len(x))
        inverse = 1.0 / scale
    else:
        scale, inverse = largest / 127.0, torch.full_like(largest, 127.0) / largest  # a number / tensor rounds twice
    inverse = torch.where(finite & (inverse < torch.inf), inverse, 0.0)
    # A row that is not finite has no numbers, whatever its products with zero are.
    rows = torch.where(finite[:, None], wide, 0.0)
    numbers = (rows * inverse[:, None]).round_().clamp_(-128, 127).to(torch.int8)
    return numbers, torch.where(finite, scale, torch.nan)


def quantize_fp8(x: Tensor, input_scale: Tensor, *, by_group: bool) -> tuple[Tensor, Tensor]:
    """Rows -> numbers of e4m3 and the scales of each row; computed in float32.

    Args:
        x: [N, I].
        input_scale: [1] float32, the scale of every row; or 0, then it is the largest magnitude / 448.
        by_group: Each 128 inputs of a row have a scale of their own, the last ones of a row where they are fewer, too;
            else all of a row have one.

    Returns:
        [N, I] float8_e4m3fn: x / scale, at most 448, rounded to nearest even; zeros where the scale is 0. And the
        scales [N, G] float32, G = ceil(I / 128) by group, else 1: NaN where something among the numbers is not finite.
    """
    rows, inputs = x.shape
    size = FP8_GROUP if by_group else max(1, inputs)
    groups = -(-inputs // size)
    wide = torch.nn.functional.pad(x.float(), (0, groups * size - inputs)).view(rows, groups, size)
    largest = wide.abs().amax(dim=2)
    finite = largest < torch.inf
    scale = input_scale.float().expand(rows, groups) if float(input_scale) > 0 else largest / FP8_MAX
    usable = (finite & (scale > 0))[..., None]
    scaled = torch.where(usable, wide, 0.0) / torch.where(usable, scale[..., None], 1.0)
    numbers = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(rows, groups * size)[:, :inputs]
    return numbers.contiguous(), torch.where(finite, scale, torch.nan)


@op
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scheme: ActivationScheme
) -> tuple[QuantizedTokens, Tensor]:
    """`add_rms_norm`, whose normed rows, rounded to the compute dtype, are quantized as the products behind them do it;
    x and residual [N, I], weight [I] -> tokens [N, I], total [N, I]. May write total over residual. Optional: where no
    backend has it, each product quantizes its own inputs."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantize_tokens(normed, scheme), total


@op
def gate_quant(gate: Tensor, up: Tensor, activation: str, scheme: ActivationScheme) -> QuantizedTokens:
    """`silu_and_mul` or `gelu_and_mul` (a name in `GATED_ACTIVATIONS`), quantized; gate and up [N, I] -> [N, I].
    Optional, as `add_rms_norm_quant` is."""
    return quantize_tokens(GATED_ACTIVATIONS[activation](gate, up), scheme)
