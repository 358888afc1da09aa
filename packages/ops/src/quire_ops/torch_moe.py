"""Op `fused_moe` through torch's own operators: a loop over the experts that any token goes to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops import torch_ops
from quire_ops.fused_moe import SWIGLUOAI_SLOPE, Experts, RunExperts
from quire_ops.linear_weights import LinearWeights

__all__ = ["swigluoai_and_mul", "torch_fused_moe"]


def torch_fused_moe(experts: Experts) -> RunExperts:
    """The experts one after the other, each with all of its tokens."""

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        if experts.activation == "swigluoai":
            return swigluoai_and_mul(gate, up, experts.limit)
        out: Tensor = getattr(torch_ops, f"{experts.activation}_and_mul")(gate, up)
        return out

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        order = torch.argsort(topk_ids.flatten(), stable=True)  # pairs of token and expert, expert by expert
        tokens, weights = order // topk_ids.shape[1], topk_weights.flatten()[order, None]
        counts = torch.bincount(topk_ids.flatten(), minlength=len(experts.gate)).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                rows = tokens[begin : begin + count]
                taken = x[rows]
                inner = activated(_linear(taken, experts.gate[expert]), _linear(taken, experts.up[expert]))
                result = _linear(inner, experts.down[expert]).float() * weights[begin : begin + count]
                out.index_add_(0, rows, result)  # an expert has a token once, so the order of additions is fixed
                begin += count
        return out.to(x.dtype)

    return run


def swigluoai_and_mul(
    gate: Tensor, up: Tensor, limit: float, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Tensor:
    """The gate of gpt-oss: both clipped, then gate * sigmoid(1.702 * gate) * (up + 1). May write over both."""
    gate, up = gate.clamp_(max=limit), up.clamp_(-limit, limit)
    return sigmoid(SWIGLUOAI_SLOPE * gate).mul_(gate).mul_(up.add_(1.0))


def _linear(x: Tensor, weights: LinearWeights) -> Tensor:
    if weights.scale is None:
        return F.linear(x, weights.weight, weights.bias)
    if weights.scale.ndim > 1:
        return torch_ops.grouped_linear(x, weights.weight, weights.scale, weights.zero, weights.bias)
    if weights.input_scale is not None:
        return torch_ops.w8a8_linear(x, weights.weight, weights.scale, weights.input_scale, weights.bias)
    return torch_ops.int8_linear(x, weights.weight, weights.scale, weights.bias)
