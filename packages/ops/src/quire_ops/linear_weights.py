"""What a linear layer multiplies with, in any form that ops take, for ops that take several layers at once.

Knows the ops of one linear layer and their references; does not know how weights are quantized or stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.linear_ops import linear, lm_head
from quire_ops.lora import LoraTokens, LoraWeights, lora_linear
from quire_ops.quantized_linear import block_linear, grouped_linear, int8_linear, w8a8_linear

__all__ = ["GatedWeights", "LinearWeights", "is_in_blocks", "reference_linear"]


class LinearWeights(NamedTuple):
    """A linear layer."""

    weight: Tensor
    """[outputs, inputs], contiguous, in the network's dtype; or as op `int8_linear`, `w8a8_linear`,
    `grouped_linear` or `block_linear` takes it. All matrices of a stack alike, but for those in blocks."""
    bias: Tensor | None = None
    """[outputs], in the network's dtype."""
    scale: Tensor | None = None
    """What a quantized weight is multiplied with, in the shape that its op takes; of one in blocks the header."""
    zero: Tensor | None = None
    """Zero points of op `grouped_linear`."""
    input_scale: Tensor | None = None
    """[1] float32 where inputs are quantized too (op `w8a8_linear`); 0 in a stack and of experts."""
    lora: LoraWeights | None = None
    """Adapters on top of it; None where the layer never has any."""
    rank_sizes: tuple[int, ...] = ()
    """Outputs of each rank, where this is one rank's part and what follows takes those of all ranks (a
    `DecoderStack.group`)."""


class GatedWeights(NamedTuple):
    """A gated feed-forward network: down(act(gate(x)) * up(x))."""

    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    activation: str = "silu"
    """"silu" or "gelu" (tanh approximation)."""
    rank_widths: tuple[int, ...] = ()
    """Outputs of gate and up of each rank, where ranks share them out; `down` takes those of all."""


def is_in_blocks(weights: LinearWeights) -> bool:
    """Whether op `block_linear` takes the weight."""
    return weights.weight.dtype == torch.uint8 and weights.scale is not None and weights.scale.ndim == 1


def reference_linear(
    x: Tensor, weights: LinearWeights, *, wide: bool = False, lora: LoraTokens | None = None
) -> Tensor:
    """Any form of a linear layer. wide: the result in float32, of a layer without a bias."""
    out = _reference_base(x, weights, wide=wide)
    if lora is not None and weights.lora is not None:
        lora_linear(out, x, weights.lora, lora)
    return out


def _reference_base(x: Tensor, weights: LinearWeights, *, wide: bool) -> Tensor:
    if weights.scale is None:
        return lm_head(x, weights.weight) if wide else linear(x, weights.weight, weights.bias)
    if weights.input_scale is not None:
        scale, input_scale = weights.scale, weights.input_scale
        return w8a8_linear(x, weights.weight, scale, input_scale, weights.bias, wide=wide)
    if is_in_blocks(weights):
        return block_linear(x, weights.weight, weights.scale, weights.bias, wide=wide)
    if weights.scale.ndim == 1:
        return int8_linear(x, weights.weight, weights.scale, weights.bias, wide=wide)
    return grouped_linear(x, weights.weight, weights.scale, weights.zero, weights.bias, wide=wide)
