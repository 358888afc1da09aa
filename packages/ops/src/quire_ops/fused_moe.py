"""Op `fused_moe`: the experts of a mixture-of-experts layer as data, and what a backend makes of them.

Knows experts, and which of them each token goes to; does not know how that is decided (routing belongs to networks),
checkpoints or how weights are quantized.

Shape legend: T tokens of the step, K experts per token, E experts, I width of the network, M width within an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_ops.activations import GATED_ACTIVATIONS, torch_gelu_and_mul, torch_silu_and_mul
from quire_ops.block_formats import decode_blocks
from quire_ops.linear_weights import LinearWeights, is_in_blocks, reference_linear
from quire_ops.op import op
from quire_ops.quantized_linear import torch_grouped_linear, torch_int8_linear, torch_w8a8_linear
from quire_ops.table import torch_backend_for

__all__ = ["EXPERT_ACTIVATIONS", "Experts", "RunExperts", "expert_network", "fused_moe", "swigluoai_and_mul",
           "torch_expert_network", "torch_fused_moe"]  # fmt: skip

EXPERT_ACTIVATIONS = ("silu", "gelu", "swigluoai")
"""swigluoai (gpt-oss): gate and up are clipped, then gate * sigmoid(1.702 * gate) * (up + 1)."""

SWIGLUOAI_SLOPE = 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Gated feed-forward networks of one shape: down(act(gate(x), up(x))).

    One matrix for each expert, so that they may be views of one stacked tensor or of files that keep them one by one.
    """

    gate: tuple[LinearWeights, ...]
    """E times [M, I]."""
    up: tuple[LinearWeights, ...]
    """E times [M, I]."""
    down: tuple[LinearWeights, ...]
    """E times [I, M]."""
    activation: str
    """One of `EXPERT_ACTIVATIONS`."""
    limit: float = 0.0
    """swigluoai: gate is at most this; up lies between this and its negative."""


class RunExperts(Protocol):
    """Experts ready to run."""

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The weighted sum of what each token's experts make of it, added in the order of the experts' numbers.

        A row's result depends on nothing but the row, its experts and their weights.

        Args:
            x: [T, I].
            topk_ids: [T, K] int64, which experts; each at most once in a row.
            topk_weights: [T, K] float32.

        Returns:
            [T, I], dtype of `x`.
        """


@op
def fused_moe(experts: Experts) -> RunExperts:
    """The experts of a mixture-of-experts layer, each with the tokens that are routed to it, and the weighted sum of
    their results. The reference takes one token at a time, in float64."""

    network = expert_network(experts)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double(), strict=True)):
            row = x[token : token + 1].double()
            for expert, weight in zip(ids, weights, strict=True):
                out[token] += weight * network(row, expert)[0]
        return out.to(x.dtype)

    return run


def expert_network(experts: Experts) -> Callable[[Tensor, int], Tensor]:
    """(rows [N, I], expert) -> [N, I]: what it makes of each row, in the rows' own dtype."""

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        if experts.activation != "swigluoai":
            return GATED_ACTIVATIONS[experts.activation](gate, up)
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return gate * torch.sigmoid(SWIGLUOAI_SLOPE * gate) * (up + 1.0)

    def network(rows: Tensor, expert: int) -> Tensor:
        gate, up = (reference_linear(rows, each[expert]) for each in (experts.gate, experts.up))
        return reference_linear(activated(gate, up), experts.down[expert])

    return network


@torch_backend_for(fused_moe)
def torch_fused_moe(experts: Experts) -> RunExperts:
    """The experts one after the other, each with all of its tokens."""
    network = torch_expert_network(experts)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        order = torch.argsort(topk_ids.flatten(), stable=True)  # pairs of token and expert, expert by expert
        tokens, weights = order // topk_ids.shape[1], topk_weights.flatten()[order, None]
        counts = torch.bincount(topk_ids.flatten(), minlength=len(experts.gate)).tolist()
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                rows = tokens[begin : begin + count]
                result = network(x[rows], expert).float() * weights[begin : begin + count]
                out.index_add_(0, rows, result)  # an expert has a token once, so the order of additions is fixed
                begin += count
        return out.to(x.dtype)

    return run


def torch_expert_network(experts: Experts) -> Callable[[Tensor, int], Tensor]:
    """As `expert_network`, by torch's operators."""

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        if experts.activation == "swigluoai":
            return swigluoai_and_mul(gate, up, experts.limit)
        return torch_silu_and_mul(gate, up) if experts.activation == "silu" else torch_gelu_and_mul(gate, up)

    def network(rows: Tensor, expert: int) -> Tensor:
        inner = activated(_linear(rows, experts.gate[expert]), _linear(rows, experts.up[expert]))
        return _linear(inner, experts.down[expert])

    return network


def swigluoai_and_mul(
    gate: Tensor, up: Tensor, limit: float, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Tensor:
    """The gate of gpt-oss: both clipped, then gate * sigmoid(1.702 * gate) * (up + 1). May write over both."""
    gate, up = gate.clamp_(max=limit), up.clamp_(-limit, limit)
    return sigmoid(SWIGLUOAI_SLOPE * gate).mul_(gate).mul_(up.add_(1.0))


def _linear(x: Tensor, weights: LinearWeights) -> Tensor:
    if weights.scale is None:
        return F.linear(x, weights.weight, weights.bias)
    if is_in_blocks(weights):
        return F.linear(x, decode_blocks(weights.weight, weights.scale).to(x.dtype), weights.bias)
    if weights.scale.ndim > 1:
        return torch_grouped_linear(x, weights.weight, weights.scale, weights.zero, weights.bias)
    if weights.input_scale is not None:
        return torch_w8a8_linear(x, weights.weight, weights.scale, weights.input_scale, weights.bias)
    return torch_int8_linear(x, weights.weight, weights.scale, weights.bias)
