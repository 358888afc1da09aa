"""Ways of shaping the distribution that local servers are known for: top-n-sigma, dynamic temperature, XTC.

Each works on single rows and touches only rows that ask. Sums are taken in blocks, so that they do not depend on the
number of threads. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_ops import uniform
from quire_ops.drawing import integer_weights
from quire_sampling.blocks import block_sum
from quire_sampling.draw import draw_weights
from quire_sampling.nucleus import Filters, keep_nucleus_

__all__ = ["XTC", "DynamicTemperature", "draw_with_xtc", "dynamic_temperature", "keep_top_sigmas_"]

XTC_STREAM = 0x58544300
"""XTC's own random numbers are those of the seed xor this: whether it acts is independent of what is drawn."""


class XTC(NamedTuple):
    """ "Exclude top choices" of one row."""

    probability: float
    threshold: float


class DynamicTemperature(NamedTuple):
    """The temperature moves from `low` (no entropy) to `high` (all tokens alike)."""

    low: float
    high: float
    exponent: float

    @classmethod
    def of(cls, params: SamplingParams) -> DynamicTemperature:
        half = params.dynatemp_range
        return cls(max(0.0, params.temperature - half), params.temperature + half, params.dynatemp_exponent)


def keep_top_sigmas_(logits: Tensor, num_sigmas: float) -> None:
    """Top-n-sigma (Tang et al. 2024, arXiv 2411.07641): set logits more than n standard deviations below the largest
    to -inf, in place. The mean and deviation are those of all finite logits.

    Args:
        logits: [V] float32. Rows without a finite logit stay as they are.
        num_sigmas: n, above 0.
    """
    is_finite = logits.isfinite()
    count = _sum(is_finite)
    exact = torch.where(is_finite, logits, 0.0).to(torch.float64)
    centred = torch.where(is_finite, exact - _sum(exact) / count, 0.0)
    sigma = (_sum(centred * centred) / count).sqrt()
    logits.masked_fill_(logits < logits.max() - num_sigmas * sigma, -torch.inf)


def dynamic_temperature(logits: Tensor, dynatemp: DynamicTemperature) -> Tensor:
    """low + (high - low) * (entropy / largest entropy) ** exponent, where the largest entropy is that of equally likely
    tokens (kalomaze 2023, "Dynamic Temperature Sampling", as in llama.cpp).

    Args:
        logits: [V] float32; tokens of -inf do not count.
        dynatemp: The range.

    Returns:
        Scalar float64.
    """
    is_alive = logits > -torch.inf
    shifted = torch.where(is_alive, logits.to(torch.float64) - logits.max(), 0.0)
    weights = torch.where(is_alive, shifted.exp(), 0.0)
    total = _sum(weights)
    entropy = total.log() - _sum(weights * shifted) / total
    largest = _sum(is_alive).clamp(min=2).log()
    share = (entropy / largest).clamp(0.0, 1.0)
    return dynatemp.low + (dynatemp.high - dynatemp.low) * share**dynatemp.exponent


def draw_with_xtc(
    log2: Tensor, logits: Tensor, filters: Filters, u: Tensor, seeds: Tensor, places: Tensor, xtcs: Sequence[XTC]
) -> Tensor:
    """Draw from what min_p, top_k, top_p and then XTC leave.

    XTC (P. E. Weidmann, text-generation-webui pull request 6335, 2024): with its probability, of all tokens at least as
    likely as the threshold only the least likely one stays; of equally likely ones that with the highest id.

    Args:
        log2: [N, V] float32, logarithms of the weights (`quire_ops.drawing`).
        logits: [N, V] float32: settles the order among equal weights.
        filters: What the other filters keep.
        u: [N] float64, the numbers to draw with.
        seeds: [N] int64.
        places: [N] int64, output positions.
        xtcs: Per row.

    Returns:
        [N] int64.
    """
    weights = keep_nucleus_(integer_weights(log2), log2, logits, filters)
    chance = uniform(seeds ^ XTC_STREAM, places)
    for i, xtc in enumerate(xtcs):
        if bool(chance[i] < xtc.probability):
            _exclude_top_choices_(weights[i], logits[i], xtc.threshold)
    return draw_weights(weights, u)


def _exclude_top_choices_(weights: Tensor, logits: Tensor, threshold: float) -> None:
    """weights [V] int64, logits [V]."""
    limit = threshold * _sum(weights)
    top = ((weights.to(torch.float64) >= limit) & (weights > 0)).nonzero().squeeze(1)
    if len(top) < 2:
        return
    own = logits[top]
    least = top[own == own.min()][-1]
    kept = weights[least].clone()
    weights[top] = 0
    weights[least] = kept


def _sum(values: Tensor) -> Tensor:
    """[V] -> scalar float64."""
    return block_sum(values.to(torch.float64).unsqueeze(0)).sum()
