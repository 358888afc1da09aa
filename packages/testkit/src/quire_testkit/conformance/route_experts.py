"""What every backend of op `route_experts` must do, as tests to inherit.

    class TestMyChoice(RouteExpertsSuite):
        def route_experts(self, logits, bias, rule): return my_choice(logits, bias, rule)

Shape legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_interfaces import ConfigError
from quire_ops import RoutingRule, ops

__all__ = ["RouteExpertsSuite"]

V3: dict[str, Any] = {"scoring": "sigmoid", "renormalize": True, "minimum": 1e-20, "scale": 2.5, "group_best": 2}
RULES = [
    # experts, whether there is a bias, rule
    (8, False, RoutingRule(top_k=2, scoring="softmax", renormalize=True)),
    (60, False, RoutingRule(top_k=4, scoring="softmax")),
    (64, True, RoutingRule(top_k=6, scoring="softmax", renormalize=True, minimum=1e-12)),
    (160, False, RoutingRule(top_k=6, scoring="softmax", scale=16.0, num_groups=8, topk_groups=3)),
    (48, False, RoutingRule(top_k=5, scoring="softmax", scale=16.0, num_groups=6, topk_groups=2)),
    (33, False, RoutingRule(top_k=4, scoring="softmax_of_chosen")),
    (5, False, RoutingRule(top_k=5, scoring="softmax_of_chosen")),
    (1, False, RoutingRule(top_k=1, scoring="softmax")),
    (256, True, RoutingRule(top_k=8, num_groups=8, topk_groups=4, **V3)),
    (24, True, RoutingRule(top_k=4, num_groups=3, topk_groups=2, **V3)),
    (384, True, RoutingRule(top_k=8, num_groups=1, topk_groups=1, **V3)),
    (700, True, RoutingRule(top_k=22, scoring="sigmoid", renormalize=True, minimum=1e-20)),
    (16, False, RoutingRule(top_k=1, scoring="sigmoid")),
]


class RouteExpertsSuite:
    """Tests of the op. Implement `route_experts`; override nothing else."""

    def route_experts(self, logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """Tensors arrive on the host; results may be anywhere."""
        raise NotImplementedError

    def _check(self, logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> None:
        ids, weights = (each.cpu() for each in self.route_experts(logits, bias, rule))
        wanted_ids, wanted = ops.route_experts(logits, bias, rule)
        assert ids.dtype == wanted_ids.dtype == torch.int64
        assert weights.dtype == wanted.dtype == torch.float32
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(weights, wanted, rtol=5e-6, atol=1e-7)

    @pytest.mark.parametrize(("num_experts", "has_bias", "rule"), RULES, ids=lambda value: str(value)[:50])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_equals_the_reference(
        self, num_experts: int, has_bias: bool, rule: RoutingRule, dtype: torch.dtype
    ) -> None:
        """Rows may be apart. Logits that were bfloat16 are often equal: the first expert comes first."""
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(5, num_experts + 3, generator=generator).to(dtype).float()
        bias = 0.3 * torch.randn(num_experts, generator=generator) if has_bias else None
        self._check(wide[:, :num_experts], bias, rule)

    @pytest.mark.parametrize("rule", [
        RoutingRule(top_k=3, scoring="softmax", renormalize=True),
        RoutingRule(top_k=3, scoring="sigmoid", num_groups=4, topk_groups=2, group_best=2),
    ], ids=lambda rule: rule.scoring)  # fmt: skip
    def test_equal_logits_and_experts_that_are_shut_out(self, rule: RoutingRule) -> None:
        logits = torch.zeros(3, 16)
        logits[1, 5:] = -float("inf")
        logits[2, 3:9] = 2.0
        self._check(logits, None, rule)

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
    def test_what_is_no_number_chooses_experts_that_there_are(self, scoring: str) -> None:
        logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
        logits[1] = float("nan")
        logits[2, 7] = float("nan")
        rule = RoutingRule(top_k=4, scoring=scoring, renormalize=True)
        ids, weights = (each.cpu() for each in self.route_experts(logits, None, rule))
        assert ids.min() >= 0
        assert ids.max() < 20
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert weights[0].isfinite().all()
        assert not weights[1:].isfinite().any()
        assert ids[2, 0] == 7 or scoring == "softmax"  # where one makes all scores no numbers

    def test_a_tokens_choice_does_not_depend_on_the_others(self) -> None:
        generator = torch.Generator().manual_seed(2)
        logits, bias = torch.randn(300, 70, generator=generator), torch.randn(70, generator=generator)
        for rule in (
            RoutingRule(top_k=6, scoring="softmax", renormalize=True),
            RoutingRule(top_k=5, num_groups=7, topk_groups=3, **V3),
        ):
            together = self.route_experts(logits, bias, rule)
            for token in (0, 1, 17, 299):
                alone = self.route_experts(logits[token : token + 1], bias, rule)
                for one, all_of_them in zip(alone, together, strict=True):
                    assert torch.equal(one[0], all_of_them[token])

    def test_a_rule_that_cannot_choose_is_refused(self) -> None:
        logits = torch.zeros(1, 10)
        with pytest.raises(ConfigError, match="'tanh'; choose one of softmax"):
            self.route_experts(logits, None, RoutingRule(top_k=1, scoring="tanh"))
        for rule in (
            RoutingRule(top_k=11, scoring="softmax"),
            RoutingRule(top_k=2, scoring="softmax", num_groups=3, topk_groups=1),
            RoutingRule(top_k=6, scoring="softmax", num_groups=2, topk_groups=1),
        ):
            with pytest.raises(ConfigError, match="cannot choose among 10 experts"):
                self.route_experts(logits, None, rule)
        assert self.route_experts(logits[:0], None, RoutingRule(top_k=3, scoring="softmax"))[0].shape == (0, 3)
