"""Choosing experts against the reference and against torch's operators, and sorting what was chosen."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import here, poison
from torch import Tensor

from quire_kernels_cuda.triton import moe
from quire_kernels_cuda.triton.routing import route_experts
from quire_models.layers import routing
from quire_ops import RoutingRule
from quire_testkit.conformance.route_experts import RouteExpertsSuite


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison(monkeypatch)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # what numpy says under the interpreter
class TestRouteExperts(RouteExpertsSuite):
    def route_experts(self, logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return route_experts(here(logits), here(bias), rule)


@pytest.mark.parametrize(
    "rule",
    [
        RoutingRule(top_k=4, scoring="softmax", renormalize=True),
        RoutingRule(top_k=4, scoring="softmax"),
        RoutingRule(top_k=4, scoring="softmax_of_chosen"),
        RoutingRule(top_k=5, scoring="softmax", scale=16.0, num_groups=6, topk_groups=2),
    ],
    ids=["softmax", "softmax as it is", "softmax of chosen", "softmax in groups"],
)
def test_equals_torchs_operators(rule: RoutingRule) -> None:
    logits = torch.randn(7, 48)
    ids, weights = (each.cpu() for each in route_experts(here(logits), None, rule))
    wanted_ids, wanted = routing.choose_experts(logits, None, rule)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 1), (6, 8), (32, 31), (33, 32), (300, 7), (129, 200)])
def test_pairs_are_sorted_as_torch_sorts_them(monkeypatch, num_pairs: int, num_experts: int) -> None:
    ids = torch.randint(0, num_experts, (num_pairs,))
    found = moe.sort_pairs(here(ids), num_experts)
    monkeypatch.setattr(moe, "MOST_COUNTED", 0)
    for got, wanted in zip(found, moe.sort_pairs(ids, num_experts), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got.cpu(), wanted)
