"""From logits and one uniform number per row to one token per row: greedy, unfiltered, and filtered draws.

One definition holds for all draws: the kept tokens' probabilities are summed up in the order of token ids, and the
token in whose interval u falls is taken (inversion of the cumulative distribution). What is kept is decided in the
order min_p, top_k, top_p, each on what the one before left; all three keep a prefix of the tokens sorted by
(larger logit, lower id).

Shapes: N rows, V vocabulary, C blocks of the vocabulary, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_sampling.blocks import block_sum, take_blocks
from quire_sampling.top import top_tokens

__all__ = ["MAX_PRUNED_TOP_K", "Filters", "draw", "draw_filtered", "greedy", "weights_"]

MAX_PRUNED_TOP_K = 1024
"""Up to this top_k only the top_k candidates are looked at; it is also the last try before a full sort."""
_FIRST_TRY = 64
_LEAST_TEMPERATURE = 1e-6  # float32 division must not meet a denormal; the result is greedy long before


class Filters(NamedTuple):
    """Per row [N]: what to keep. Neutral values: top_k = V, top_p = 1, min_p = 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def take(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def greedy(logits: Tensor, maxima: Tensor) -> Tensor:
    """Most likely token, the lowest id among equals. logits [N, V], maxima [N, C] -> [N] int64.

    Rows with NaN give a token id in range, nothing more.
    """
    blocks = maxima.argmax(-1, keepdim=True)  # argmax gives the first of equal maxima
    values, ids = take_blocks(logits, blocks, fill=-torch.inf)
    return ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1).clamp(max=logits.shape[1] - 1)


def weights_(logits: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - max) / temperature), in place: [N, V] float32 -> the same tensor, largest entry 1.

    The maximum is taken off before the division: logits / temperature would lose digits when temperature is small.
    """
    peak = maxima.amax(-1, keepdim=True)
    return logits.sub_(peak).div_(temperature.clamp(min=_LEAST_TEMPERATURE).unsqueeze(1)).exp_()


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw by inversion in the order of token ids: first the block, then the token within the block.

    Args:
        weights: [N, V] float32, not negative, not normalized; a token of weight 0 is never drawn.
        u: [N] float64 in [0, 1).

    Returns:
        [N] int64. Rows whose weights do not sum to a positive finite number give a token id in range, nothing more.
    """
    sums = block_sum(weights)
    cumulative = sums.cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    last = sums.shape[1] - 1
    block = (cumulative <= target).sum(-1, keepdim=True).clamp(max=last)
    block_weight = sums.gather(1, block)
    rest = target - (cumulative.gather(1, block) - block_weight)
    values, ids = take_blocks(weights, block, fill=0.0)
    inner = values.to(torch.float64).cumsum(-1)
    # A block's float32 sum and its float64 sum differ in the last digits; the fraction carries over, the digits do not.
    inner_target = rest / block_weight * inner[:, -1:]
    return _pick(values, inner, inner_target, ids).clamp(max=weights.shape[1] - 1)


def draw_filtered(logits: Tensor, maxima: Tensor, temperature: Tensor, filters: Filters, u: Tensor) -> Tensor:
    """Draw among the tokens that `filters` keep.

    Rows with top_k up to 1024 look at that many candidates. The others try 64, then 1024 candidates, and only where
    these provably do not hold all kept tokens is the whole row sorted. Which way a row goes depends on this row alone.

    Args:
        logits: [N, V] float32; not changed.
        maxima: [N, C], `block_max(logits)`.
        temperature: [N] float32, above 0.
        filters: What to keep.
        u: [N] float64 in [0, 1).

    Returns:
        [N] int64. Rows with NaN or with nothing but -inf give a token id in range, nothing more.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    small = filters.top_k <= MAX_PRUNED_TOP_K
    rows = small.nonzero().squeeze(1)
    if len(rows):
        k = min(int(filters.top_k[rows].max()), vocab_size)
        tokens[rows] = _draw_pruned(logits, maxima, temperature, filters, u, rows, k, None)[0]
    rows = (~small).nonzero().squeeze(1)
    if not len(rows):
        return tokens
    total = torch.zeros(num_rows, dtype=torch.float64, device=logits.device)
    total[rows] = block_sum(weights_(logits[rows], maxima[rows], temperature[rows])).sum(-1)
    for k in (_FIRST_TRY, MAX_PRUNED_TOP_K):
        drawn, complete = _draw_pruned(logits, maxima, temperature, filters, u, rows, min(k, vocab_size), total)
        tokens[rows] = drawn
        rows = rows[~complete]
        if not len(rows):
            return tokens
    tokens[rows] = _draw_sorted(logits[rows], temperature[rows], filters.take(rows), u[rows])
    return tokens


def _draw_pruned(
    logits: Tensor,
    maxima: Tensor,
    temperature: Tensor,
    filters: Filters,
    u: Tensor,
    rows: Tensor,
    k: int,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw for `rows` among their k largest tokens: (tokens, whether all kept tokens were among them).

    `total` is the weight of the whole row; None says that every row's top_k is at most k.
    """
    values, ids = top_tokens(logits[rows], k, maxima[rows])
    weights = weights_(values, values[:, :1], temperature[rows]).to(torch.float64)
    filters = filters.take(rows)
    if total is None or k == logits.shape[1]:
        mass, complete = None, torch.ones_like(rows, dtype=torch.bool)
    else:
        row_total = total[rows]
        below_min_p = weights[:, -1] < filters.min_p
        unbounded = (filters.min_p == 0) & (filters.top_k >= logits.shape[1]) & (filters.top_p < 1)
        complete = below_min_p | (unbounded & (weights.sum(-1) >= filters.top_p * row_total))
        mass = torch.where(below_min_p, torch.nan, row_total)
    weights = _keep(weights, filters, mass)
    order = ids.argsort(dim=-1)
    ids, weights = ids.gather(1, order), weights.gather(1, order)
    cumulative = weights.cumsum(-1)
    return _pick(weights, cumulative, u[rows].unsqueeze(1) * cumulative[:, -1:], ids), complete


def _draw_sorted(logits: Tensor, temperature: Tensor, filters: Filters, u: Tensor) -> Tensor:
    """The way without shortcuts: sort whole rows. logits [N, V] is changed."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = weights_(values, values[:, :1], temperature)
    kept = _keep(weights.to(torch.float64), filters, None)
    return draw(torch.zeros_like(logits).scatter_(1, ids, kept.to(torch.float32)), u)


def _keep(weights: Tensor, filters: Filters, mass: Tensor | None) -> Tensor:
    """Set to 0 what min_p, top_k and top_p remove. weights [N, K] float64, sorted descending, the first one 1.

    `mass` [N] is what top_p is a share of; None (or NaN for a row) means the sum of what min_p and top_k keep.
    """
    place = torch.arange(weights.shape[1], device=weights.device)
    kept = (weights >= filters.min_p.unsqueeze(1)) & (place < filters.top_k.unsqueeze(1))
    weights = weights * kept
    cumulative = weights.cumsum(-1)
    own = cumulative[:, -1]
    share = filters.top_p * (own if mass is None else torch.where(mass.isnan(), own, mass))
    before = cumulative - weights
    return weights * (before < share.unsqueeze(1))


def _pick(weights: Tensor, cumulative: Tensor, target: Tensor, ids: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds the target, at most the last one of positive weight."""
    place = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, place, 0).amax(-1, keepdim=True)
    return ids.gather(1, torch.minimum((cumulative <= target).sum(-1, keepdim=True), last)).squeeze(1)
