"""Op `fused_moe`: the experts of a mixture-of-experts layer as data, and what a backend makes of them.

Knows experts, and which of them each token goes to; does not know how that is decided (routing belongs to networks),
checkpoints or how weights are quantized.

Shape legend: T tokens of the step, K experts per token, E experts, I width of the network, M width within an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire_ops import reference
from quire_ops.linear_weights import LinearWeights, reference_linear

__all__ = ["EXPERT_ACTIVATIONS", "Experts", "RunExperts", "reference_fused_moe"]

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


def reference_fused_moe(experts: Experts) -> RunExperts:
    """The experts one token at a time, in float64."""

    def activated(gate: Tensor, up: Tensor) -> Tensor:
        if experts.activation != "swigluoai":
            out: Tensor = getattr(reference, f"{experts.activation}_and_mul")(gate, up)
            return out
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return gate * torch.sigmoid(SWIGLUOAI_SLOPE * gate) * (up + 1.0)

    def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double(), strict=True)):
            row = x[token : token + 1].double()
            for expert, weight in zip(ids, weights, strict=True):
                gate, up = (reference_linear(row, each[expert]) for each in (experts.gate, experts.up))
                inner = activated(gate, up)
                out[token] += weight * reference_linear(inner, experts.down[expert])[0]
        return out.to(x.dtype)

    return run
