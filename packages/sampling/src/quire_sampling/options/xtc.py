"""XTC, "exclude top choices" (P. E. Weidmann, text-generation-webui pull request 6335, 2024).

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire_interfaces import SamplingParams
from quire_ops import uniform
from quire_sampling.blocks import exact_sum
from quire_sampling.option import FilterOption, RequestContext, RowWeights

__all__ = ["OPTIONS"]

_STREAM = 0x58544300
"""XTC's own random numbers are those of the seed xor this: whether it acts is independent of which token is sampled."""


class XTC(NamedTuple):
    """XTC of one row: how likely it acts, and from which probability on a token is a top choice."""

    probability: float
    threshold: float


def _compile(params: SamplingParams, context: RequestContext) -> XTC | None:
    return XTC(params.xtc_probability, params.xtc_threshold) if params.xtc_probability > 0 else None


def _apply(xtc: XTC, row: RowWeights) -> None:
    """With its probability, of all tokens at least as likely as the threshold only the least likely one stays; of
    equally likely ones that with the highest id."""
    if not bool(uniform(row.seed ^ _STREAM, row.output_position) < xtc.probability):
        return
    weights, logits = row.weights[0], row.logits[0]
    limit = xtc.threshold * exact_sum(weights)
    top = ((weights.to(torch.float64) >= limit) & (weights > 0)).nonzero().squeeze(1)
    if len(top) < 2:
        return
    top_logits = logits[top]
    least = top[top_logits == top_logits.min()][-1]
    least_weight = weights[least].clone()
    weights[top] = 0
    weights[least] = least_weight


OPTIONS = (FilterOption(name="xtc_probability", compile=_compile, apply=_apply),)
