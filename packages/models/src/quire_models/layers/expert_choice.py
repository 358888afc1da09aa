"""A router's choice of experts by a rule: one kernel where a backend has it, torch's operators otherwise.

Shape legend: T tokens of the step, E experts, K experts per token.
"""

from __future__ import annotations

from torch import Tensor

from quire_models.layers.activations import activation
from quire_models.layers.routing import (
    CorrectionBias,
    Select,
    biased_softmax_topk,
    grouped_sigmoid_topk,
    grouped_softmax_topk,
    sigmoid_topk,
    softmax_topk,
    topk_softmax,
)
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule, ops

__all__ = ["ExpertChoice"]


class ExpertChoice:
    """Logits [T, E] float32, which it may write over -> (topk_ids [T, K] int64, topk_weights [T, K] float32)."""

    __slots__ = ("_bias", "_select", "num_experts", "rule")

    def __init__(
        self, scope: Scope, num_experts: int, rule: RoutingRule, *, bias: CorrectionBias | None = None
    ) -> None:
        """Args:
        bias: Added to scores when experts are chosen, and not to their weights; None for none.
        """
        self.num_experts, self.rule, self._bias = num_experts, rule, bias
        backend = scope.choose(ops.route_experts, experts=num_experts)
        self._select: Select
        if backend.name == scope.choose(ops.lm_head).name and rule.fits(num_experts):
            scope.chosen.append(backend)
            self._select = lambda logits: backend.function(logits, None if bias is None else bias.value, rule)
        elif rule.scoring == "sigmoid":
            # The last bit of torch.sigmoid follows how many numbers there are; that of op `activation` does not.
            sigmoid, select = activation(scope, "sigmoid"), _by_torch(rule, bias)
            self._select = lambda logits: select(sigmoid(logits))
        else:
            self._select = _by_torch(rule, bias)

    @property
    def bias(self) -> Tensor | None:
        """[E] float32, added to scores when experts are chosen, and not to their weights; None for none."""
        return None if self._bias is None else self._bias.value

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._select(logits)


def _by_torch(rule: RoutingRule, bias: CorrectionBias | None) -> Select:
    """What the rule says, by the function of `routing.py` that does this and no more; sigmoids are made before it."""
    k, renormalize, scale = rule.top_k, rule.renormalize, rule.scale
    groups = {"num_groups": rule.num_groups, "topk_groups": rule.topk_groups}
    is_simple = rule.num_groups == 1 and scale == 1.0
    if rule.scoring == "softmax_of_chosen":
        assert is_simple
        assert bias is None
        return lambda logits: topk_softmax(logits, k)
    if rule.scoring == "softmax" and bias is not None:
        assert is_simple
        assert renormalize
        return lambda logits: biased_softmax_topk(logits, k, bias=bias.value, minimum=rule.minimum)
    if rule.scoring == "softmax" and is_simple:
        return lambda logits: softmax_topk(logits, k, renormalize=renormalize)
    if rule.scoring == "softmax":
        assert not renormalize
        assert rule.group_best == 1
        return lambda logits: grouped_softmax_topk(logits, k, scale=scale, **groups)
    if rule.num_groups == 1:
        return lambda scores: sigmoid_topk(
            scores, k, bias=None if bias is None else bias.value, renormalize=renormalize, scale=scale
        )
    assert bias is not None
    assert rule.group_best == 2
    return lambda scores: grouped_sigmoid_topk(
        scores, k, bias=bias.value, renormalize=renormalize, scale=scale, **groups
    )
