"""Locally typical sampling (Meister, Pimentel, Wiher, Cotterell 2022, arXiv 2202.00666, section 4).

Shapes: V vocabulary, K tokens that are left.
"""

from __future__ import annotations

import torch

from quire_interfaces import SamplingParams
from quire_ops.sampling import share_of
from quire_sampling.blocks import exact_sum
from quire_sampling.option import FilterOption, RequestContext, RowWeights

__all__ = ["OPTIONS"]


def _compile(params: SamplingParams, context: RequestContext) -> float | None:
    return params.typical_p if params.typical_p < 1 else None


def _apply(typical_p: float, row: RowWeights) -> None:
    """Keep the tokens whose surprise is nearest to the entropy, the fewest that hold typical_p of the weight; of
    equally near ones those with lower ids."""
    ids = row.weights[0].nonzero().squeeze(1)
    weights = row.weights[0, ids]
    p = weights.to(torch.float64) / weights.sum()
    surprise = -p.log()
    order = (surprise - exact_sum(p * surprise)).abs().sort(stable=True).indices
    ordered = weights[order]
    share = share_of(torch.tensor(typical_p, dtype=torch.float64, device=weights.device), weights.sum())
    row.weights[0, ids[order[ordered.cumsum(0) - ordered >= share]]] = 0


OPTIONS = (FilterOption(name="typical_p", compile=_compile, apply=_apply),)
