"""How tokens choose their experts: router logits [T, E] float32 -> which experts, and how much each one counts.

Every function returns (topk_ids [T, K] int64, topk_weights [T, K] float32), as op `fused_moe` takes them. A row's
choice depends on that row alone, to the bit: torch's softmax of the last dimension, its largest and their sum go
through a row in one way, however many rows there are. Its sigmoid does not, so that is an op, see `ExpertChoice`.

Shape legend: T tokens of the step, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_models.layers.scope import Parameter, Scope
from quire_ops import ops

__all__ = [
    "CorrectionBias",
    "Router",
    "Select",
    "biased_softmax_topk",
    "grouped_sigmoid_topk",
    "grouped_softmax_topk",
    "sigmoid_topk",
    "softmax_topk",
    "topk_softmax",
]

Select = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits, or scores, [T, E] -> (topk_ids, topk_weights) [T, K]."""


def softmax_topk(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The k most probable experts; their probabilities, made to sum to one if `renormalize` (Mixtral, Qwen)."""
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), k, dim=-1)
    return ids, weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights


def biased_softmax_topk(logits: Tensor, k: int, *, bias: Tensor, minimum: float) -> tuple[Tensor, Tensor]:
    """The k most probable experts after a bias; their probabilities over their sum, which is at least `minimum`."""
    probabilities = torch.softmax(logits, dim=-1)
    ids = torch.topk(probabilities + bias, k, dim=-1).indices
    weights = probabilities.gather(1, ids)
    return ids, weights / weights.sum(dim=-1, keepdim=True).clamp_min(minimum)


def grouped_softmax_topk(
    logits: Tensor, k: int, *, scale: float, num_groups: int, topk_groups: int
) -> tuple[Tensor, Tensor]:
    """The k most probable experts of the `topk_groups` groups whose best is best (DeepSeek-V2, sec. 2.2.2)."""
    probabilities = torch.softmax(logits, dim=-1)
    groups = probabilities.view(len(logits), num_groups, -1)
    best = groups.max(dim=-1).values  # [T, groups]
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(topk_groups, dim=-1).indices, True)
    weights, ids = groups.masked_fill(~chosen[:, :, None], 0.0).flatten(1).topk(k, dim=-1)
    return ids, weights * scale


def topk_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits, and the softmax over these (Granite, gpt-oss)."""
    chosen, ids = torch.topk(logits, k, dim=-1)
    return ids, torch.softmax(chosen, dim=-1)


def sigmoid_topk(
    scores: Tensor, k: int, *, bias: Tensor | None, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Each expert scored on its own, by the sigmoid of its logit; the bias decides who is chosen, never how much it
    counts (Wang et al. 2024)."""
    return _weigh(scores, None, k, bias, renormalize, scale)


def grouped_sigmoid_topk(
    scores: Tensor, k: int, *, bias: Tensor, renormalize: bool, scale: float, num_groups: int, topk_groups: int
) -> tuple[Tensor, Tensor]:
    """As `sigmoid_topk`, from the `topk_groups` groups of experts whose two best are best (DeepSeek-V3, sec. 2.1.2)."""
    groups = (scores + bias).view(len(scores), num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1)  # [T, groups]
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(topk_groups, dim=-1).indices, True)
    allowed = chosen[:, :, None].expand_as(groups).reshape(scores.shape)
    return _weigh(scores, allowed, k, bias, renormalize, scale)


def _weigh(
    scores: Tensor, allowed: Tensor | None, k: int, bias: Tensor | None, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    choice = scores if bias is None else scores + bias
    if allowed is not None:
        choice = choice.masked_fill(~allowed, float("-inf"))
    ids = torch.topk(choice, k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * scale


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


class Router:
    """x [T, size] -> the experts of each token. Its weight is never quantized; logits are kept as wide as summed."""

    __slots__ = ("_bias_parameter", "_linear", "_parameter", "bias", "select", "weight")

    def __init__(self, scope: Scope, size: int, num_experts: int, select: Select, *, bias: bool = False) -> None:
        self._linear = scope.op(ops.lm_head)
        self.select = select
        self._parameter = scope.parameter("weight", num_experts, size)
        self._bias_parameter: Parameter | None = scope.parameter("bias", num_experts) if bias else None
        self.weight: Tensor
        """[E, size]."""
        self.bias: Tensor | None = None
        """[E] float32, of the logits."""
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
