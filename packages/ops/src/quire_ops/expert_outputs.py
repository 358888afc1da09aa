"""Ops `expert_outputs` and `moe_sum`: op `fused_moe` in two, for experts that are on several ranks.

What the experts make of each token comes from where they are, as wide as it is summed; the sum then has the order and
the roundings of `fused_moe`, so that it has the same bits wherever an expert was.

Shape legend: T tokens of the step, K experts per token, P pairs of token and expert, I width of the network.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quire_ops.fused_moe import Experts, expert_network, torch_expert_network
from quire_ops.op import op
from quire_ops.table import torch_backend_for

__all__ = ["RunExpertOutputs", "expert_outputs", "moe_sum", "torch_expert_outputs", "torch_moe_sum"]


class RunExpertOutputs(Protocol):
    """Experts ready to run, each on rows of its own."""

    def __call__(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        """What one expert makes of each row. A row's result depends on nothing but the row and its expert.

        Args:
            x: [P, I].
            expert_ids: [P] int64, of each row.

        Returns:
            [P, I] float32, not rounded to the dtype of `x` where the backend sums wider than that.
        """


@op
def expert_outputs(experts: Experts) -> RunExpertOutputs:
    """What one expert of a mixture-of-experts layer makes of each row: `fused_moe` before the sum. The reference takes
    one row at a time, in float64."""
    network = expert_network(experts)

    def run(x: Tensor, expert_ids: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        for i, expert in enumerate(expert_ids.tolist()):
            out[i] = network(x[i : i + 1].double(), expert)[0]
        return out

    return run


@op
def moe_sum(values: Tensor, topk_ids: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum of what each token's experts made of it, added in the order of the experts' numbers: `fused_moe`
    behind `expert_outputs`.

    values [T, K, I] float32, topk_ids [T, K] int64, topk_weights [T, K] float32 -> [T, I] of `dtype`.
    """
    return (values.double() * topk_weights.double()[..., None]).sum(1).to(dtype)


@torch_backend_for(expert_outputs)
def torch_expert_outputs(experts: Experts) -> RunExpertOutputs:
    """The experts one after the other, each with all of its rows."""
    network = torch_expert_network(experts)

    def run(x: Tensor, expert_ids: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        for expert in torch.unique(expert_ids).tolist():
            rows = torch.where(expert_ids == expert)[0]
            out[rows] = network(x[rows], expert).float()
        return out

    return run


@torch_backend_for(moe_sum)
def torch_moe_sum(values: Tensor, topk_ids: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """One expert after the other, in float32: each product is rounded before it is added, as in `torch_fused_moe`."""
    order = topk_ids.argsort(dim=1)[..., None]
    weighted = (values * topk_weights[..., None]).gather(1, order.expand_as(values))
    out = torch.zeros_like(weighted[:, 0])
    for part in weighted.unbind(1):
        out += part
    return out.to(dtype)
