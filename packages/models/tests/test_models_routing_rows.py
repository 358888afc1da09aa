"""Choosing experts gives a token the same bits whatever tokens are beside it, where networks promise that."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quire_models.layers.routing import (
    Select,
    biased_softmax_topk,
    grouped_sigmoid_topk,
    grouped_softmax_topk,
    sigmoid_topk,
    softmax_topk,
    topk_softmax,
)

NUM_EXPERTS = [8, 20, 60, 64, 72, 160, 512]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_experts", NUM_EXPERTS)
@pytest.mark.parametrize(
    "select",
    [
        partial(softmax_topk, k=4, renormalize=False),
        partial(softmax_topk, k=8, renormalize=True),
        partial(topk_softmax, k=6),
        partial(biased_softmax_topk, k=3, bias=torch.zeros(()), minimum=1e-12),
        partial(grouped_softmax_topk, k=3, scale=2.5, num_groups=4, topk_groups=2),
        partial(sigmoid_topk, k=6, bias=None, renormalize=True, scale=1.0),
        partial(
            grouped_sigmoid_topk,
            k=4,
            bias=torch.zeros(()),
            renormalize=True,
            scale=2.5,
            num_groups=4,
            topk_groups=2,
        ),
    ],
    ids=["softmax", "renormalized", "after", "biased", "grouped", "sigmoid", "grouped sigmoid"],
)
def test_a_token_s_experts_do_not_follow_its_neighbours(select: Select, num_experts: int, threads: int) -> None:
    torch.manual_seed(num_experts)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tokens in (2, 7, 33, 700):
            logits = torch.randn(tokens, num_experts) * 3
            ids, weights = select(logits)
            for token in {0, 1, tokens // 2, tokens - 1}:
                alone = select(logits[token : token + 1].clone())
                assert torch.equal(alone[0][0], ids[token])
                assert torch.equal(alone[1][0], weights[token])
    finally:
        torch.set_num_threads(before)
