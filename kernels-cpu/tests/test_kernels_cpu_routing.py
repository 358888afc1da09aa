"""Choosing experts by the compiled kernel."""

from __future__ import annotations

from torch import Tensor

from quire_kernels_cpu.routing import route_experts
from quire_ops import RoutingRule
from quire_testkit.conformance.route_experts import RouteExpertsSuite


class TestRouteExperts(RouteExpertsSuite):
    def route_experts(self, logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return route_experts(logits, bias, rule)
