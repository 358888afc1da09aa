"""Modules that only Step 3.5 has: gated networks whose inner numbers are kept within a limit.

Shape legend: T tokens of the step, M inner width.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import Tensor

from quire_models.build import build_feed_forward
from quire_models.families.step3p5 import LimitedMLPSpec, LimitedMoESpec
from quire_models.layers.activations import activation
from quire_models.layers.expert_parallel import PlacedExperts
from quire_models.layers.linear import Linear
from quire_models.layers.moe import FusedExperts, make_router
from quire_models.layers.scope import Scope
from quire_ops.expert_outputs import torch_moe_sum
from quire_quantization.experts import EACH_EXPERT, FUSED, ExpertsChoice

__all__ = ["LimitedMLP", "LimitedMoE"]


class LimitedMLP:
    """x [T, size] -> [T, size]: down(min(act(gate(x)), c) * clamp(up(x), -c, c))."""

    def __init__(self, spec: LimitedMLPSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner = scope / spec.name
        self._gate, self._up, self._down = (Linear.of(inner, each) for each in spec.projections())
        self._act, self._limit = activation(scope, spec.act), spec.limit

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._act(self._gate(x)).clamp(max=self._limit), self._up(x).clamp(-self._limit, self._limit)
        return self._down(gate * up)


class LimitedExperts(FusedExperts):
    """Experts with the limit c of their record, one after the other."""

    def _bind(self) -> None:
        super()._bind()
        self.choice = ExpertsChoice(EACH_EXPERT, ((FUSED, "knows no limits"),))
        self._experts = None
        if self.placed is None:
            self._run = self._one_by_one

    def _share(self, placed: PlacedExperts) -> None:
        self._run = partial(placed.run, outputs=self._outputs_one_by_one, sum_=torch_moe_sum)

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = self._gate_op(gate, up.new_ones(()).expand_as(up).contiguous())
        return gate.clamp(max=self._limit) * up.clamp(-self._limit, self._limit)


class LimitedMoE:
    """x [T, I] -> [T, I]: what the router's experts make of each token, and the shared network's part, with limits."""

    make_experts: ClassVar[type[LimitedExperts]] = LimitedExperts

    def __init__(self, spec: LimitedMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner, stacked, shared = scope / spec.name, spec.stacked, spec.shared
        assert stacked is not None
        assert shared is not None
        self._router = make_router(spec, inner)
        self._experts = (self.make_experts if spec.limit else FusedExperts)(spec, inner / "experts")
        self._experts.accept_stacked(inner, stacked.names, inputs_first=stacked.inputs_first)
        self._shared = build_feed_forward(shared, scope)

    def __call__(self, x: Tensor) -> Tensor:
        return self._experts(x, *self._router(x)) + self._shared(x)
