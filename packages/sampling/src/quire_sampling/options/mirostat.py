"""Mirostat: sampling that steers the surprise of the output, in bits per token, towards a target.

Basu, Ramachandran, Keskar, Varshney, "Mirostat: a neural text decoding algorithm that directly controls perplexity",
ICLR 2021 (arXiv 2007.14966). Version 1 is its algorithm 1 (top-k with k from a Zipf exponent), version 2 the shorter
one of the authors' repository, which cuts at a surprise of mu.

The one option with a state: mu, which each sampled token moves. It is kept per output position, so that a position that
is sampled again (after a preemption, behind a rejected draft) begins from the mu it began from before.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_sampling.blocks import block_sum
from quire_sampling.nucleus import Filters, keep_nucleus_
from quire_sampling.option import RequestContext, RowWeights, TokenOption
from quire_sampling.sample import sample_weights
from quire_sampling.top import top_tokens

__all__ = ["OPTIONS"]

_ZIPF_TOKENS = 100
"""Most likely tokens from which version 1 estimates the exponent."""
_NUM_KEPT_POSITIONS = 64
"""More than the steps that run ahead and the draft tokens of a step, together."""


@dataclass(slots=True, kw_only=True)
class Mirostat:
    """Mirostat of one row: its parameters, and mu before each of the latest output positions."""

    mode: int
    tau: float
    eta: float
    mu: dict[int, Tensor] = field(default_factory=dict)
    """Output position -> scalar float64. A position that is not there begins with 2 tau."""

    def learn(self, output_position: int, mu: Tensor, surprise: Tensor) -> None:
        """Move mu by the surprise, in bits, of the token sampled at an output position."""
        self.mu[output_position + 1] = mu - self.eta * (surprise - self.tau)
        self.mu.pop(output_position + 1 - _NUM_KEPT_POSITIONS, None)


def _compile(params: SamplingParams, context: RequestContext) -> Mirostat | None:
    if params.mirostat_mode == 0:
        return None
    return Mirostat(mode=params.mirostat_mode, tau=params.mirostat_tau, eta=params.mirostat_eta)


def _apply(mirostat: Mirostat, row: RowWeights) -> Tensor:
    """Cut the weights by mu, sample a token, and learn from it."""
    weights, output_position = row.weights, int(row.output_position)
    mu = mirostat.mu.get(output_position)
    if mu is None:
        mu = torch.tensor(2.0 * mirostat.tau, dtype=torch.float64, device=weights.device)
    total = block_sum(weights).sum()
    if mirostat.mode == 1:
        everything = torch.ones(1, dtype=torch.float64, device=weights.device)
        no_min_p = torch.full((1,), -torch.inf, device=weights.device)
        filters = Filters(_zipf_k(weights, mu, total), everything, no_min_p)
        keep_nucleus_(weights, row.log2, row.logits, filters)
        surprise_total = total  # version 1 is surprised by the model's own probability
    else:
        least = torch.minimum(torch.exp2(-mu) * total, weights.max())
        weights.mul_(weights.to(torch.float64) >= least)
        surprise_total = block_sum(weights).sum()
    token = sample_weights(weights, row.uniform)
    probability = weights[0, token[0]].to(torch.float64) / surprise_total
    mirostat.learn(output_position, mu, -probability.log2())
    return token


def _zipf_k(weights: Tensor, mu: Tensor, total: Tensor) -> Tensor:
    """How many tokens version 1 keeps: [1] int64, from 1 to V. weights [1, V] int64."""
    vocab_size = weights.shape[1]
    best = top_tokens(weights.to(torch.float32), min(_ZIPF_TOKENS + 1, vocab_size))[0].squeeze(0).to(torch.float64)
    best = best[best > 0] / total
    num_pairs = len(best) - 1
    if num_pairs < 1:
        return torch.tensor([vocab_size], device=weights.device)
    place = torch.arange(1, num_pairs + 1, dtype=torch.float64, device=weights.device)
    steps = ((place + 1) / place).log()
    exponent = float((steps * (best[:-1] / best[1:]).log()).sum() / (steps * steps).sum())
    if exponent <= 0:
        return torch.tensor([vocab_size], device=weights.device)
    excess = exponent - 1
    # (1 - V ** -excess) / excess, of which the limit at 0 is log V
    spread = -math.expm1(-excess * math.log(vocab_size)) / excess if abs(excess) > 1e-9 else math.log(vocab_size)
    log_k = (float(mu) * math.log(2) - math.log(spread)) / exponent
    k = vocab_size if log_k >= math.log(vocab_size) else max(1, round(math.exp(log_k)))
    return torch.tensor([k], device=weights.device)


OPTIONS = (TokenOption(name="mirostat_mode", compile=_compile, apply=_apply, is_stateful=True),)
