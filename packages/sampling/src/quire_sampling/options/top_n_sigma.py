"""Top-n-sigma (Tang et al. 2024, arXiv 2411.07641): only tokens whose logit is near the largest.

Shapes: V vocabulary.
"""

from __future__ import annotations

import torch

from quire_interfaces import SamplingParams
from quire_sampling.blocks import exact_sum
from quire_sampling.option import EditOption, EditStage, RequestContext, RowLogits

__all__ = ["OPTIONS"]


def _compile(params: SamplingParams, context: RequestContext) -> float | None:
    return params.top_n_sigma if params.top_n_sigma > 0 else None


def _apply(num_sigmas: float, row: RowLogits) -> None:
    """Set logits more than n standard deviations below the largest to -inf. Mean and deviation are those of all finite
    logits; a row without a finite logit stays as it is."""
    logits = row.logits
    is_finite = logits.isfinite()
    count = exact_sum(is_finite)
    exact = torch.where(is_finite, logits, 0.0).to(torch.float64)
    centred = torch.where(is_finite, exact - exact_sum(exact) / count, 0.0)
    sigma = (exact_sum(centred * centred) / count).sqrt()
    logits.masked_fill_(logits < logits.max() - num_sigmas * sigma, -torch.inf)


OPTIONS = (EditOption(name="top_n_sigma", stage=EditStage.TRUNCATE, compile=_compile, apply=_apply),)
