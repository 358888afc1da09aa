"""Modules that only Nemotron-H has.

Shape legend: T tokens of the step, E experts, K experts per token, I what experts take, M width within an expert.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from quire_models.families.nemotron_h import UngatedMoESpec
from quire_models.feed_forward_spec import MLPSpec
from quire_models.layers.activations import activation
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import MLP
from quire_models.layers.moe import make_router, place_experts
from quire_models.layers.scope import Scope
from quire_ops.expert_outputs import torch_moe_sum

__all__ = ["NemotronHMoE", "UngatedExperts"]


class UngatedExperts:
    """(x [T, I], topk_ids, topk_weights [T, K]) -> [T, I]: the weighted sum of each token's down(act(up(x)))."""

    def __init__(self, spec: UngatedMoESpec, scope: Scope) -> None:
        scope = dataclasses.replace(scope, adapters=None)  # as `FusedExperts`
        (up, down), size, inner = spec.names, spec.expert_size, spec.intermediate_size
        self.placed = place_experts(spec.num_experts, scope)
        each = [scope / str(one) for one in (range(spec.num_experts) if self.placed is None else self.placed.own)]
        self.up = [Linear(one / up, size, inner, is_replicated=True) for one in each]
        self.down = [Linear(one / down, inner, size, is_replicated=True) for one in each]
        self.act = activation(scope, spec.act)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        if self.placed is not None:
            self.placed.begin()
            return self.placed.run(x, topk_ids, topk_weights, outputs=self._outputs, sum_=torch_moe_sum)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            tokens, ranks = torch.where(topk_ids == expert)
            result = self.down[expert](self.act(self.up[expert](x[tokens])))
            out.index_add_(0, tokens, result.float() * topk_weights[tokens, ranks, None])
        return out.to(x.dtype)

    def _outputs(self, x: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
        """Rows [P, I] -> [P, I] float32, each through the layers of its own expert, which this rank has."""
        assert self.placed is not None
        out = torch.empty_like(x, dtype=torch.float32)
        for expert in torch.unique(experts).tolist():
            rows, slot = torch.where(experts == expert)[0], int(self.placed.slots[expert])
            out[rows] = self.down[slot](self.act(self.up[slot](x[rows]))).float()
        return out


class NemotronHMoE:
    """x [T, hidden_size] -> the same: what the router's experts make of it, and the network that every token uses."""

    def __init__(self, spec: UngatedMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner = scope / spec.name
        self.router = make_router(spec, inner)
        self.experts = UngatedExperts(spec, inner / "experts")
        self.around = tuple(Linear.of(inner, each) for each in spec.latent_projections())
        assert isinstance(spec.shared, MLPSpec)
        self.shared = MLP(spec.shared, scope / spec.shared.name)

    def __call__(self, x: Tensor) -> Tensor:
        topk_ids, topk_weights = self.router(x)
        if not self.around:
            return self.experts(x, topk_ids, topk_weights) + self.shared(x)
        down, up = self.around
        return up(self.experts(down(x), topk_ids, topk_weights)) + self.shared(x)
