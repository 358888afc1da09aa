"""How tokens choose their experts: router logits [T, E] float32 -> which experts, and how much each one counts.

Choices are (topk_ids [T, K] int64, topk_weights [T, K] float32), as op `fused_moe` takes them: made by one kernel where
a backend has op `route_experts`, by torch's operators otherwise.

Shape legend: T tokens of the step, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_models.layers.activations import activation
from quire_models.layers.scope import Parameter, Scope
from quire_ops import RoutingRule, ops
from quire_ops.routing import EXPERT_SCORINGS

__all__ = ["CorrectionBias", "ExpertChoice", "Router", "Select", "choose_experts", "sqrt_softplus"]

Select = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [T, E] -> (topk_ids, topk_weights) [T, K]."""


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    rule: RoutingRule,
    score: Callable[[Tensor], Tensor] = torch.sigmoid,
    outside: float = -torch.inf,
) -> tuple[Tensor, Tensor]:
    """What op `route_experts` says, in float32 by torch's operators.

    A row's choice depends on that row alone, to the bit: torch's softmax of the last dimension, its largest and their
    sum go through a row in one way, however many rows there are. Its sigmoid does not.

    Args:
        logits: [T, E] float32.
        bias: [E] float32, added to scores when experts are chosen, and not to their weights; None for none.
        score: What scores each expert by itself, where neither softmax does. A sigmoid gives a number the same bits
            wherever it stands, where a network promises that.
        outside: Score of the experts of other groups, in the choice alone.

    Returns:
        topk_ids [T, K] int64, topk_weights [T, K] float32.
    """
    scores = logits
    if rule.scoring != "softmax_of_chosen":
        scores = torch.softmax(logits, dim=-1) if rule.scoring == "softmax" else score(logits)
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        groups = choice.unflatten(-1, (rule.num_groups, -1))
        goodness = groups.topk(rule.group_best, dim=-1).values.sum(dim=-1)  # [T, groups]
        best = goodness.topk(rule.topk_groups, dim=-1).indices
        others = torch.ones_like(goodness, dtype=torch.bool).scatter_(1, best, False)
        choice = groups.masked_fill(others[:, :, None], outside).flatten(1)
    ids = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if rule.scoring == "softmax_of_chosen":
        weights = torch.softmax(weights, dim=-1)
    if rule.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(rule.minimum)
    return ids, weights if rule.scale == 1.0 else weights * rule.scale


def sqrt_softplus(logits: Tensor) -> Tensor:
    """sqrt(log(1 + exp(logits))), the scores of DeepSeek-V4."""
    return F.softplus(logits).sqrt()


class CorrectionBias:
    """[E] float32, which decides who is chosen and never how much it counts."""

    __slots__ = ("_parameter", "value")

    def __init__(self, scope: Scope, name: str, *shape: int) -> None:
        """Args:
        name: Of the parameter in this scope, which has this shape.
        """
        self._parameter = scope.parameter(name, *shape, dtype=torch.float32)
        self.value: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.value = self._parameter.take().flatten()


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
        if (
            backend.name == scope.choose(ops.lm_head).name
            and rule.fits(num_experts)
            and rule.scoring in EXPERT_SCORINGS
        ):
            scope.chosen.append(backend)
            self._select = lambda logits: backend.function(logits, self.bias, rule)
        else:
            score = activation(scope, "sigmoid") if rule.scoring == "sigmoid" else sqrt_softplus
            self._select = lambda logits: choose_experts(logits, self.bias, rule, score)

    @property
    def bias(self) -> Tensor | None:
        """[E] float32, added to scores when experts are chosen, and not to their weights; None for none."""
        return None if self._bias is None else self._bias.value

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._select(logits)


class Router:
    """x [T, size] -> the experts of each token. Its weight is never quantized; logits are kept as wide as summed."""

    __slots__ = ("_bias_parameter", "_linear", "_parameter", "bias", "select", "weight")

    def __init__(
        self,
        scope: Scope,
        size: int,
        num_experts: int,
        select: Select,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Args:
        dtype: Of the weight; None for the compute dtype.
        """
        self._linear = scope.op(ops.lm_head)
        self.select = select
        self._parameter = scope.parameter("weight", num_experts, size, dtype=dtype)
        self._bias_parameter: Parameter | None = scope.parameter("bias", num_experts) if bias else None
        self.weight: Tensor
        """[E, size]."""
        self.bias: Tensor | None = None
        """[E] float32, of the logits."""
        scope.routers.append(self)
        scope.when_loaded(self._finish)

    @property
    def name(self) -> str:
        """Of the weight, in full."""
        return self._parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, size]."""
        return self._parameter.shape

    def _finish(self) -> None:
        self.weight = self._parameter.take()
        if self._bias_parameter is not None:
            self.bias = self._bias_parameter.take().float()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self._linear(x, self.weight)
        return self.select(logits if self.bias is None else logits + self.bias)
