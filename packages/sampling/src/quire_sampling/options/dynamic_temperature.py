"""Dynamic temperature (kalomaze 2023, "Dynamic Temperature Sampling", as in llama.cpp): it follows the entropy.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_sampling.blocks import exact_sum
from quire_sampling.option import RequestContext, TemperatureOption

__all__ = ["OPTIONS"]


class DynamicTemperature(NamedTuple):
    """The temperature moves from `low` (no entropy) to `high` (all tokens alike)."""

    low: float
    high: float
    exponent: float


def _compile(params: SamplingParams, context: RequestContext) -> DynamicTemperature | None:
    half = params.dynatemp_range
    if half <= 0:
        return None
    return DynamicTemperature(max(0.0, params.temperature - half), params.temperature + half, params.dynatemp_exponent)


def _apply(dynatemp: DynamicTemperature, logits: Tensor) -> Tensor:
    """low + (high - low) * (entropy / largest entropy) ** exponent, where the largest entropy is that of equally likely
    tokens; tokens of -inf do not count."""
    is_alive = logits > -torch.inf
    shifted = torch.where(is_alive, logits.to(torch.float64) - logits.max(), 0.0)
    weights = torch.where(is_alive, shifted.exp(), 0.0)
    total = exact_sum(weights)
    entropy = total.log() - exact_sum(weights * shifted) / total
    largest = exact_sum(is_alive).clamp(min=2).log()
    share = (entropy / largest).clamp(0.0, 1.0)
    return dynatemp.low + (dynatemp.high - dynatemp.low) * share**dynatemp.exponent


OPTIONS = (TemperatureOption(name="dynatemp_range", compile=_compile, apply=_apply),)
