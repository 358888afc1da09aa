"""Op `route_experts`: which experts each token goes to, and how much each one counts.

Knows router logits and the rules of published networks as data; does not know experts or how logits are computed.

Shape legend: T tokens of the step, E experts, K experts per token, G groups of neighbouring experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_ops.op import op

__all__ = ["EXPERT_SCORINGS", "RoutingRule", "route_experts"]

EXPERT_SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")
"""What an expert is scored with: its probability among all; a number of its own; or its logit, where only those that
were chosen share a softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How a network's tokens choose."""

    top_k: int
    scoring: str
    """One of `EXPERT_SCORINGS`; or another, by which networks choose without this op."""
    renormalize: bool = False
    """The chosen scores are divided by their sum."""
    minimum: float = 0.0
    """That sum is at least this."""
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    topk_groups: int = 1
    """Only experts of so many groups can be chosen (DeepSeek-V2, sec. 2.2.2): of those that are best."""
    group_best: int = 1
    """1: a group is as good as its best expert; 2: as its two best together (DeepSeek-V3, sec. 2.1.2)."""

    def fits(self, num_experts: int) -> bool:
        """Whether so many experts make equal groups, and the groups that are left have experts enough."""
        size, rest = divmod(num_experts, self.num_groups)
        return rest == 0 and size >= self.group_best and self.top_k <= self.topk_groups * size


@op
def route_experts(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """The K best experts of each token, best first, the first of equals, and how much each counts. Experts are scored
    by the rule's scoring of the logits; the bias is added to the scores for choosing alone; where the rule has groups,
    only experts of the best groups can be chosen. Optional: where no backend has it, networks choose by torch's
    operators.

    logits [T, E] float32, bias [E] float32 -> topk_ids [T, K] int64, topk_weights [T, K] float32.
    """
    wide = logits.double()
    scores = {"softmax": torch.softmax(wide, -1), "sigmoid": torch.sigmoid(wide)}.get(rule.scoring, wide)
    choice = scores if bias is None else scores + bias.double()
    if rule.num_groups > 1:
        groups = choice.unflatten(-1, (rule.num_groups, -1))  # [T, G, E / G]
        goodness = groups.topk(rule.group_best, -1).values.sum(-1)
        best_groups = goodness.sort(stable=True, dim=-1, descending=True).indices[:, : rule.topk_groups]
        outside = torch.ones_like(goodness, dtype=torch.bool).scatter_(1, best_groups, False)
        choice = groups.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
    ids = choice.sort(stable=True, dim=-1, descending=True).indices[:, : rule.top_k]
    weights = scores.gather(1, ids)
    if rule.scoring == "softmax_of_chosen":
        weights = torch.softmax(weights, -1)
    if rule.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(rule.minimum)
    return ids, (weights * rule.scale).float()
