"""min_p, top_k and top_p over a whole vocabulary without sorting it.

A histogram over the leading bits of the weights finds the narrow range of weights in which the kept set ends; only
that range is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Filters", "keep_nucleus_"]

_SHIFT = 16
_NUM_BINS = (0x3F800000 >> _SHIFT) + 1  # 0x3F800000 are the bits of 1.0, the largest weight


class Filters(NamedTuple):
    """Per row [N]: what to keep. Neutral values: top_k = V, top_p = 1, min_p = 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def keep_nucleus_(weights: Tensor, logits: Tensor, filters: Filters) -> Tensor:
    """Set to 0 the weights that min_p, top_k and top_p (nucleus sampling, Holtzman et al. 2019, section 3.1) remove.

    Args:
        weights: [N, V] float32 from 0 to 1, growing with the logits; changed in place.
        logits: [N, V] float32: settles the order among equal weights (then: lower id first).
        filters: What to keep.

    Returns:
        `weights`.
    """
    vocab_size = weights.shape[1]
    weights.mul_(weights >= filters.min_p.unsqueeze(1))
    if bool((filters.top_k < vocab_size).any()):
        _keep_prefix_(weights, logits, torch.ones_like(weights), filters.top_k.to(torch.float64))
    exact = weights.to(torch.float64)
    _keep_prefix_(weights, logits, exact, filters.top_p * exact.sum(-1))
    return weights


def _keep_prefix_(weights: Tensor, logits: Tensor, amounts: Tensor, share: Tensor) -> None:
    """Keep the shortest prefix, in the order of falling weight, whose amounts [N, V] add up to share [N] float64."""
    bins = (weights.view(torch.int32) >> _SHIFT).clamp_(0, _NUM_BINS - 1).to(torch.int64)
    histogram = torch.zeros(len(weights), _NUM_BINS, dtype=torch.float64, device=weights.device)
    histogram.scatter_add_(1, bins, amounts.to(torch.float64))
    from_top = histogram.flip(1)
    cumulative = from_top.cumsum(1)
    crossing = (cumulative < share.unsqueeze(1)).sum(-1, keepdim=True).clamp(max=_NUM_BINS - 1)
    before = (cumulative - from_top).gather(1, crossing).squeeze(1)
    edge = _NUM_BINS - 1 - crossing
    weights.mul_(bins >= edge)
    for i in range(len(weights)):
        ids = (bins[i] == edge[i]).nonzero().squeeze(1)
        ids = ids[logits[i, ids].sort(descending=True, stable=True).indices]
        own = amounts[i, ids].to(torch.float64)
        reached = before[i] + own.cumsum(0) - own >= share[i]
        weights[i, ids[reached]] = 0
