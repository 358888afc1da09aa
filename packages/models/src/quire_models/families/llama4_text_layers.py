"""Modules that only Llama 4 has.

Shape legend: T tokens of the step, K experts per token, I width of the network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.families.llama4_text import WeightedInputMoESpec
from quire_models.feed_forward_spec import GatedMLPSpec
from quire_models.layers.activations import activation
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope

__all__ = ["WeightedInputMoE"]


class WeightedInputMoE:
    """x [T, I] -> [T, I]: a token's weight scales what its experts get; beside them is a shared one."""

    __slots__ = ("_experts", "_router", "_shared")

    def __init__(self, spec: WeightedInputMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner, num_chosen, sigmoid = scope / spec.name, spec.routing.top_k, activation(scope, "sigmoid")

        def select(logits: Tensor) -> tuple[Tensor, Tensor]:
            chosen, ids = torch.topk(logits, num_chosen, dim=-1)
            return ids, sigmoid(chosen)

        self._router = Router(inner / spec.router, spec.hidden_size, spec.num_experts, select)
        self._experts = FusedExperts(spec, inner / "experts")
        assert spec.stacked is not None
        self._experts.accept_stacked(inner, spec.stacked.names, inputs_first=spec.stacked.inputs_first)
        assert isinstance(spec.shared, GatedMLPSpec)
        self._shared = GatedMLP(spec.shared, scope / spec.shared.name)

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self._router(x)
        scaled = (x[:, None] * weights[:, :, None].to(x.dtype)).flatten(0, 1)  # [T K, I]
        out = self._experts(scaled, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return self._shared(x) + out.view(*ids.shape, -1).sum(dim=1)
