"""min_p, top_k and top_p over a whole vocabulary without sorting it.

A histogram over the logarithms of the weights finds the narrow range in which the kept set ends; only that range is
sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.sampling import LOWEST, share_of

__all__ = ["Filters", "keep_nucleus_"]

_PER_OCTAVE = 64
_LAST_BIN = int(-LOWEST) * _PER_OCTAVE


class Filters(NamedTuple):
    """Per row [N]: what to keep. Neutral values: top_k = V, top_p = 1, min_log2 = -inf."""

    top_k: Tensor
    top_p: Tensor
    min_log2: Tensor

    def take(self, index: Tensor) -> Filters:
        return Filters(*(each[index] for each in self))


def keep_nucleus_(weights: Tensor, log2: Tensor, logits: Tensor, filters: Filters) -> Tensor:
    """Set to 0 the weights that min_p, top_k and top_p (nucleus sampling, Holtzman et al. 2019, section 3.1) remove.

    Args:
        weights: [N, V] int64; changed in place.
        log2: [N, V] float32, their logarithms.
        logits: [N, V] float32: settles the order within a bin of the histogram (then: lower id first).
        filters: What to keep.

    Returns:
        `weights`.
    """
    bins = (log2 * -_PER_OCTAVE).clamp_(max=_LAST_BIN).to(torch.int64).clamp_(min=0)
    passing = log2 >= filters.min_log2.unsqueeze(1)
    weights.mul_(passing)
    if bool((filters.top_k < weights.shape[1]).any()):
        _keep_prefix_(weights, bins, logits, passing.to(torch.int64), filters.top_k)
    _keep_prefix_(weights, bins, logits, weights.clone(), share_of(filters.top_p, weights.sum(-1)))
    return weights


def _keep_prefix_(weights: Tensor, bins: Tensor, logits: Tensor, amounts: Tensor, share: Tensor) -> None:
    """Keep the shortest prefix, by falling logits, whose amounts [N, V] int64 add up to share [N] int64."""
    histogram = torch.zeros(len(weights), _LAST_BIN + 1, dtype=torch.int64, device=weights.device)
    histogram.scatter_add_(1, bins, amounts)
    cumulative = histogram.cumsum(1)
    crossing = (cumulative < share.unsqueeze(1)).sum(-1, keepdim=True).clamp(max=_LAST_BIN)
    before = (cumulative - histogram).gather(1, crossing).squeeze(1)
    weights.mul_(bins <= crossing)
    for i in range(len(weights)):
        ids = (bins[i] == crossing[i]).nonzero().squeeze(1)
        ids = ids[logits[i, ids].sort(descending=True, stable=True).indices]
        own = amounts[i, ids]
        reached = before[i] + own.cumsum(0) - own >= share[i]
        weights[i, ids[reached]] = 0
