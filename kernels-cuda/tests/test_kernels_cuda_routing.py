"""Choosing experts against the reference and against torch's operators, and sorting what was chosen."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DEVICE, here, poison
from torch import Tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.triton import moe
from quire_kernels_cuda.triton.routing import route_experts
from quire_models.layers import routing
from quire_ops import RoutingRule
from quire_ops.routing import reference_route_experts

V3 = {"scoring": "sigmoid", "renormalize": True, "minimum": 1e-20, "scale": 2.5, "group_best": 2}
RULES = [
    # experts, whether there is a bias, rule
    (8, False, RoutingRule(top_k=2, scoring="softmax", renormalize=True)),
    (60, False, RoutingRule(top_k=4, scoring="softmax")),
    (64, True, RoutingRule(top_k=6, scoring="softmax", renormalize=True, minimum=1e-12)),
    (160, False, RoutingRule(top_k=6, scoring="softmax", scale=16.0, num_groups=8, topk_groups=3)),
    (33, False, RoutingRule(top_k=4, scoring="softmax_of_chosen")),
    (5, False, RoutingRule(top_k=5, scoring="softmax_of_chosen")),
    (1, False, RoutingRule(top_k=1, scoring="softmax")),
    (256, True, RoutingRule(top_k=8, num_groups=8, topk_groups=4, **V3)),
    (24, True, RoutingRule(top_k=4, num_groups=3, topk_groups=2, **V3)),
    (384, True, RoutingRule(top_k=8, num_groups=1, topk_groups=1, **V3)),
    (700, True, RoutingRule(top_k=22, scoring="sigmoid", renormalize=True, minimum=1e-20)),
    (16, False, RoutingRule(top_k=1, scoring="sigmoid")),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison(monkeypatch)


def check(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> None:
    ids, weights = (each.cpu() for each in route_experts(here(logits), here(bias), rule))
    wanted_ids, wanted = reference_route_experts(logits, bias, rule)
    assert ids.dtype == wanted_ids.dtype == torch.int64
    assert weights.dtype == wanted.dtype == torch.float32
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize(("num_experts", "has_bias", "rule"), RULES, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference(num_experts: int, has_bias: bool, rule: RoutingRule, dtype: torch.dtype) -> None:
    """Rows may be apart. Logits that were bfloat16 are often equal: the first expert comes first."""
    wide = torch.randn(5, num_experts + 3).to(dtype).float()
    bias = 0.3 * torch.randn(num_experts) if has_bias else None
    check(wide[:, :num_experts], bias, rule)


@pytest.mark.parametrize("rule", [
    RoutingRule(top_k=3, scoring="softmax", renormalize=True),
    RoutingRule(top_k=3, scoring="sigmoid", num_groups=4, topk_groups=2, group_best=2),
], ids=lambda rule: rule.scoring)  # fmt: skip
def test_equal_logits_and_experts_that_are_shut_out(rule: RoutingRule) -> None:
    logits = torch.zeros(3, 16)
    logits[1, 5:] = -float("inf")
    logits[2, 3:9] = 2.0
    check(logits, None, rule)


def test_what_is_no_number_chooses_experts_that_there_are() -> None:
    logits = torch.randn(3, 20)
    logits[1] = float("nan")
    logits[2, 7] = float("nan")
    rule = RoutingRule(top_k=4, scoring="sigmoid", renormalize=True)
    ids, weights = (each.cpu() for each in route_experts(here(logits), None, rule))
    assert ids.min() >= 0
    assert ids.max() < 20
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert weights[0].isfinite().all()
    assert not weights[1:].isfinite().any()
    assert ids[2, 0] == 7


BIAS = 0.3 * torch.randn(48, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("rule", "by_torch"), [
    (RoutingRule(top_k=4, scoring="softmax", renormalize=True),
     lambda x: routing.softmax_topk(x, 4, renormalize=True)),
    (RoutingRule(top_k=4, scoring="softmax"), lambda x: routing.softmax_topk(x, 4, renormalize=False)),
    (RoutingRule(top_k=4, scoring="softmax_of_chosen"), lambda x: routing.topk_softmax(x, 4)),
    (RoutingRule(top_k=5, scoring="softmax", scale=16.0, num_groups=6, topk_groups=2),
     lambda x: routing.grouped_softmax_topk(x, 5, scale=16.0, num_groups=6, topk_groups=2)),
], ids=["softmax", "softmax as it is", "softmax of chosen", "softmax in groups"])  # fmt: skip
def test_equals_torchs_operators(rule: RoutingRule, by_torch) -> None:
    logits = torch.randn(7, 48)
    ids, weights = (each.cpu() for each in route_experts(here(logits), None, rule))
    wanted_ids, wanted = by_torch(logits)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=5e-6, atol=1e-7)


def test_a_rule_that_cannot_choose_is_refused() -> None:
    logits = torch.zeros(1, 10, device=DEVICE)
    with pytest.raises(ConfigError, match="'tanh'; choose one of softmax"):
        route_experts(logits, None, RoutingRule(top_k=1, scoring="tanh"))
    for rule in (
        RoutingRule(top_k=11, scoring="softmax"),
        RoutingRule(top_k=2, scoring="softmax", num_groups=3, topk_groups=1),
        RoutingRule(top_k=6, scoring="softmax", num_groups=2, topk_groups=1),
    ):
        with pytest.raises(ConfigError, match="cannot choose among 10 experts"):
            route_experts(logits, None, rule)
    assert route_experts(logits[:0], None, RoutingRule(top_k=3, scoring="softmax"))[0].shape == (0, 3)


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 1), (6, 8), (32, 31), (33, 32), (300, 7), (129, 200)])
def test_pairs_are_sorted_as_torch_sorts_them(monkeypatch, num_pairs: int, num_experts: int) -> None:
    ids = torch.randint(0, num_experts, (num_pairs,))
    found = moe.sort_pairs(here(ids), num_experts)
    monkeypatch.setattr(moe, "MOST_COUNTED", 0)
    for got, wanted in zip(found, moe.sort_pairs(ids, num_experts), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got.cpu(), wanted)
