"""Choosing experts gives a token the same bits whatever tokens are beside it, where networks promise that."""

from __future__ import annotations

import pytest
import torch

from quire_models.layers.routing import choose_experts
from quire_ops import RoutingRule

NUM_EXPERTS = [8, 20, 60, 64, 72, 160, 512]


def exact_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoids from float64, whose last bits float32 does not show: torch's own follow where a number stands."""
    return x.double().sigmoid().float()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
@pytest.mark.parametrize(
    "rule",
    [
        RoutingRule(top_k=4, scoring="softmax"),
        RoutingRule(top_k=8, scoring="softmax", renormalize=True),
        RoutingRule(top_k=6, scoring="softmax_of_chosen"),
        RoutingRule(top_k=3, scoring="softmax", renormalize=True, minimum=1e-12),
        RoutingRule(top_k=3, scoring="softmax", scale=2.5, num_groups=4, topk_groups=2),
        RoutingRule(top_k=6, scoring="sigmoid", renormalize=True, minimum=1e-20),
        RoutingRule(
            top_k=4,
            scoring="sigmoid",
            renormalize=True,
            minimum=1e-20,
            scale=2.5,
            num_groups=4,
            topk_groups=2,
            group_best=2,
        ),
    ],
    ids=["softmax", "renormalized", "after", "biased", "grouped", "sigmoid", "grouped sigmoid"],
)
def test_a_token_s_experts_do_not_follow_its_neighbours(rule: RoutingRule, num_experts: int, threads: int) -> None:
    torch.manual_seed(num_experts)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tokens in (2, 7, 33, 700):
            logits, bias = torch.randn(tokens, num_experts) * 3, torch.zeros(num_experts)
            ids, weights = choose_experts(logits, bias, rule, exact_sigmoid)
            for token in {0, 1, tokens // 2, tokens - 1}:
                alone = choose_experts(logits[token : token + 1].clone(), bias, rule, exact_sigmoid)
                assert torch.equal(alone[0][0], ids[token])
                assert torch.equal(alone[1][0], weights[token])
    finally:
        torch.set_num_threads(before)
