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
from quire_sampling.nucleus import Filters, keep_nucleus_
from quire_sampling.top import top_tokens

__all__ = ["SMALL_TOP_K", "draw", "draw_among_top", "draw_filtered", "greedy", "weights_"]

SMALL_TOP_K = 256
"""Up to this top_k, `draw_among_top` is the faster way."""
_FIRST_TRY = 64
_CHUNK_ROWS = 8  # bounds the memory of the way through the whole vocabulary
_LEAST_TEMPERATURE = 1e-6  # float32 division must not meet a denormal; the result is greedy long before


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


def draw_among_top(logits: Tensor, maxima: Tensor, temperature: Tensor, filters: Filters, u: Tensor, k: int) -> Tensor:
    """Draw where every row has a small top_k: only the k largest tokens are looked at.

    Args:
        logits: [N, V] float32; not changed.
        maxima: [N, C], `block_max(logits)`.
        temperature: [N] float32, above 0.
        filters: What to keep; no top_k above `k`.
        u: [N] float64 in [0, 1).
        k: From 1 to V.

    Returns:
        [N] int64. Rows with NaN or with nothing but -inf give a token id in range, nothing more.
    """
    candidates = _candidates(logits, maxima, temperature, k)
    return _draw_candidates(candidates, _keep(candidates.weights, filters, None), u)


def draw_filtered(logits: Tensor, maxima: Tensor, temperature: Tensor, filters: Filters, u: Tensor) -> Tensor:
    """Draw where top_k is large or absent, so that top_p and min_p alone say how many tokens are kept.

    Usually a few tokens hold most of the weight: 64 candidates are tried first. Rows for which they provably do not
    hold all kept tokens go through the whole vocabulary. Which way a row goes depends on this row alone.

    Args and result are those of `draw_among_top`.
    """
    vocab_size = logits.shape[1]
    k = min(_FIRST_TRY, vocab_size)
    candidates = _candidates(logits, maxima, temperature, k)
    weights = weights_(logits.clone(), maxima, temperature)
    total = block_sum(weights).sum(-1)
    below_min_p = candidates.weights[:, -1] < filters.min_p
    only_top_p = (filters.min_p == 0) & (filters.top_k >= vocab_size)
    complete = only_top_p & (candidates.weights.sum(-1) >= filters.top_p * total)
    mass = torch.where(below_min_p, torch.nan, total)
    tokens = _draw_candidates(candidates, _keep(candidates.weights, filters, mass), u)
    rest = (~(complete | below_min_p)).nonzero().squeeze(1)
    for start in range(0, len(rest), _CHUNK_ROWS):
        chunk = rest[start : start + _CHUNK_ROWS]
        kept = keep_nucleus_(weights[chunk], logits[chunk], filters.take(chunk))
        tokens[chunk] = draw(kept, u[chunk])
    return tokens


class _Candidates(NamedTuple):
    weights: Tensor  # [N, K] float64, sorted descending, the first one 1
    ids: Tensor  # [N, K] int64


def _candidates(logits: Tensor, maxima: Tensor, temperature: Tensor, k: int) -> _Candidates:
    values, ids = top_tokens(logits, k, maxima)
    return _Candidates(weights_(values, values[:, :1], temperature).to(torch.float64), ids)


def _draw_candidates(candidates: _Candidates, kept: Tensor, u: Tensor) -> Tensor:
    order = candidates.ids.argsort(dim=-1)
    ids, kept = candidates.ids.gather(1, order), kept.gather(1, order)
    cumulative = kept.cumsum(-1)
    return _pick(kept, cumulative, u.unsqueeze(1) * cumulative[:, -1:], ids)


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
