"""Mirostat: sampling that steers the surprise of the output, in bits per token, towards a target.

Basu, Ramachandran, Keskar, Varshney, "Mirostat: a neural text decoding algorithm that directly controls perplexity",
ICLR 2021 (arXiv 2007.14966). Version 1 is its algorithm 1 (top-k with k from a Zipf exponent), version 2 the shorter
one of the authors' repository, which cuts at a surprise of mu.

The one sampler with a memory: mu, which each drawn token moves. It is kept per output position, so that a position that
is drawn again (after a preemption, behind a rejected draft) begins from the mu it began from before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_ops.drawing import integer_weights
from quire_sampling.blocks import block_sum
from quire_sampling.draw import draw_weights
from quire_sampling.nucleus import Filters, keep_nucleus_
from quire_sampling.top import top_tokens

__all__ = ["KeptMirostat", "Mirostat", "draw_mirostat"]

_ZIPF_TOKENS = 100
"""Most likely tokens from which version 1 estimates the exponent."""
_NUM_KEPT_POSITIONS = 64
"""More than the steps that run ahead and the draft tokens of a step, together."""
_NUM_KEPT_REQUESTS = 4096


@dataclass(slots=True, kw_only=True)
class Mirostat:
    """Mirostat of one row: what it wants, and mu before each of the latest output positions."""

    request_id: str | None
    mode: int
    tau: float
    eta: float
    mu: dict[int, Tensor] = field(default_factory=dict)
    """Output position -> scalar float64. A position that is not there begins with 2 tau."""

    def learn(self, place: int, mu: Tensor, surprise: Tensor) -> None:
        """Take in the surprise of the token drawn at an output position."""
        self.mu[place + 1] = mu - self.eta * (surprise - self.tau)
        self.mu.pop(place + 1 - _NUM_KEPT_POSITIONS, None)


class KeptMirostat:
    """Remembers rows that were left, for requests that come back after a preemption: the latest 4,096."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, Mirostat] = OrderedDict()

    def keep(self, mirostat: Mirostat) -> None:
        """The row was left."""
        if mirostat.request_id is None or not mirostat.mu:
            return
        self._left[mirostat.request_id] = mirostat
        if len(self._left) > _NUM_KEPT_REQUESTS:
            self._left.popitem(last=False)

    def take(self, request_id: str | None, params: SamplingParams) -> Mirostat:
        """The state to go on with, or a new one."""
        if request_id is not None and request_id in self._left:
            return self._left.pop(request_id)
        return Mirostat(
            request_id=request_id, mode=params.mirostat_mode, tau=params.mirostat_tau, eta=params.mirostat_eta
        )


def draw_mirostat(
    log2: Tensor, logits: Tensor, u: Tensor, mirostats: Sequence[Mirostat], places: Sequence[int]
) -> Tensor:
    """Draw one token per row and learn from it. Rows of one request come in the order of their positions.

    Args:
        log2: [N, V] float32, logarithms of the weights at the row's temperature (`quire_ops.drawing`).
        logits: [N, V] float32: settles the order among equal weights.
        u: [N] float64 in [0, 1).
        mirostats: Per row.
        places: Per row: the output position to be drawn.

    Returns:
        [N] int64.
    """
    tokens = torch.empty(len(log2), dtype=torch.int64, device=log2.device)
    for i, (mirostat, place) in enumerate(zip(mirostats, places, strict=True)):
        mu = mirostat.mu.get(place)
        if mu is None:
            mu = torch.tensor(2.0 * mirostat.tau, dtype=torch.float64, device=log2.device)
        one = integer_weights(log2[i : i + 1])
        total = block_sum(one).sum()
        if mirostat.mode == 1:
            k = _zipf_k(one, mu, total)
            everything = torch.ones(1, dtype=torch.float64, device=one.device)
            filters = Filters(k, everything, torch.full((1,), -torch.inf, device=one.device))
            keep_nucleus_(one, log2[i : i + 1], logits[i : i + 1], filters)
            drawn_total = total  # version 1 is surprised by the model's own probability
        else:
            least = torch.minimum(torch.exp2(-mu) * total, one.max())
            one.mul_(one.to(torch.float64) >= least)
            drawn_total = block_sum(one).sum()
        token = draw_weights(one, u[i : i + 1])
        tokens[i : i + 1] = token
        probability = one[0, token[0]].to(torch.float64) / drawn_total
        mirostat.learn(place, mu, -probability.log2())
    return tokens


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
