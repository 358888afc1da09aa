"""Op `sample` with torch: greedy, plain and filtered sampling, none of which sorts a vocabulary.

`quire_ops.sampling` says which token is sampled; here are the ways to get there with little work. Weights are integers
and their sums exact, so that all ways give the same token.

Shapes: N rows, V vocabulary, C blocks of the vocabulary, K candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_ops.sampling import integer_weights, log2_weights, share_of, target_of
from quire_sampling.blocks import block_sum, take_blocks
from quire_sampling.nucleus import Filters, keep_nucleus_
from quire_sampling.top import top_tokens

__all__ = ["SMALL_TOP_K", "greedy", "sample_filtered", "sample_plain", "sample_top_k", "sample_weights"]

SMALL_TOP_K = 256
"""Up to this top_k, `sample_top_k` is the faster way."""
_FIRST_TRY = 64
_CHUNK_ROWS = 8  # bounds the memory of the way through the whole vocabulary


def greedy(logits: Tensor, maxima: Tensor) -> Tensor:
    """Most likely token, the lowest id among equals. logits [N, V], maxima [N, C] -> [N] int64.

    Rows with NaN give a token id in range, nothing more.
    """
    blocks = maxima.argmax(-1, keepdim=True)  # argmax gives the first of equal maxima
    values, ids = take_blocks(logits, blocks, fill=-torch.inf)
    return ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1).clamp(max=logits.shape[1] - 1)


def sample_plain(logits: Tensor, maxima: Tensor, inv_temperature: Tensor, u: Tensor) -> Tensor:
    """Sample from all tokens.

    Args:
        logits: [N, V] float32; not changed.
        maxima: [N, C], `block_max(logits)`.
        inv_temperature: [N] float32, log2(e) / temperature.
        u: [N] float64 in [0, 1).

    Returns:
        [N] int64. Rows with NaN or with nothing but -inf give a token id in range, nothing more.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    max_logits = maxima.amax(-1)
    for start in range(0, len(logits), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        weights = integer_weights(log2_weights(logits[chunk], max_logits[chunk], inv_temperature[chunk]))
        tokens[chunk] = sample_weights(weights, u[chunk])
    return tokens


def sample_top_k(
    logits: Tensor, maxima: Tensor, inv_temperature: Tensor, filters: Filters, u: Tensor, k: int
) -> Tensor:
    """Sample where every row has a small top_k: only the k largest tokens are looked at.

    Args:
        logits: [N, V] float32; not changed.
        maxima: [N, C], `block_max(logits)`.
        inv_temperature: [N] float32, log2(e) / temperature.
        filters: What to keep; no top_k above `k`.
        u: [N] float64 in [0, 1).
        k: From 1 to V.

    Returns:
        [N] int64.
    """
    candidates = _candidates(logits, maxima, inv_temperature, k)
    kept = _passing(candidates, filters)
    return _sample_candidates(candidates, _keep_share(kept, filters.top_p, kept.sum(-1)), u)


def sample_filtered(logits: Tensor, maxima: Tensor, inv_temperature: Tensor, filters: Filters, u: Tensor) -> Tensor:
    """Sample where top_k is large or absent, so that top_p and min_p alone say how many tokens are kept.

    Usually a few tokens hold most of the weight: 64 candidates are tried first. Rows for which they do not hold all
    kept tokens go through the whole vocabulary.

    Args:
        logits: [N, V] float32; not changed.
        maxima: [N, C], `block_max(logits)`.
        inv_temperature: [N] float32, log2(e) / temperature.
        filters: What to keep.
        u: [N] float64 in [0, 1).

    Returns:
        [N] int64.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    max_logits = maxima.amax(-1)
    for start in range(0, len(logits), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        some = Filters(*(each[chunk] for each in filters))
        tokens[chunk] = _sample_chunk(
            logits[chunk], maxima[chunk], max_logits[chunk], inv_temperature[chunk], some, u[chunk]
        )
    return tokens


def _sample_chunk(
    logits: Tensor, maxima: Tensor, max_logits: Tensor, inv_temperature: Tensor, filters: Filters, u: Tensor
) -> Tensor:
    vocab_size = logits.shape[1]
    candidates = _candidates(logits, maxima, inv_temperature, min(_FIRST_TRY, vocab_size))
    log2 = log2_weights(logits, max_logits, inv_temperature)
    weights = integer_weights(log2)
    total = block_sum(weights).sum(-1)
    below_min_p = candidates.log2[:, -1] < filters.min_log2
    only_top_p = filters.min_log2.isneginf() & (filters.top_k >= vocab_size)
    complete = only_top_p & (candidates.weights.sum(-1) >= share_of(filters.top_p, total))
    kept = _passing(candidates, filters)
    kept = _keep_share(kept, filters.top_p, torch.where(below_min_p, kept.sum(-1), total))
    tokens = _sample_candidates(candidates, kept, u)
    rest = (~(complete | below_min_p)).nonzero().squeeze(1)
    if len(rest):
        kept = keep_nucleus_(weights[rest], log2[rest], logits[rest], filters.take(rest))
        tokens[rest] = sample_weights(kept, u[rest])
    return tokens


class _Candidates(NamedTuple):
    """The most likely tokens, best first; [N, K] each."""

    ids: Tensor
    log2: Tensor
    weights: Tensor


def _candidates(logits: Tensor, maxima: Tensor, inv_temperature: Tensor, k: int) -> _Candidates:
    values, ids = top_tokens(logits, k, maxima)
    log2 = log2_weights(values, values[:, 0], inv_temperature)
    return _Candidates(ids, log2, integer_weights(log2))


def _passing(candidates: _Candidates, filters: Filters) -> Tensor:
    """Weights [N, K], 0 where min_p and top_k remove them."""
    place = torch.arange(candidates.ids.shape[1], device=candidates.ids.device)
    kept = (candidates.log2 >= filters.min_log2.unsqueeze(1)) & (place < filters.top_k.unsqueeze(1))
    return candidates.weights * kept


def _keep_share(weights: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """Weights [N, K], best first, 0 where top_p of `total` [N] is reached before."""
    before = weights.cumsum(-1) - weights
    return weights * (before < share_of(top_p, total).unsqueeze(1))


def _sample_candidates(candidates: _Candidates, kept: Tensor, u: Tensor) -> Tensor:
    order = candidates.ids.argsort(dim=-1)
    cumulative = kept.gather(1, order).cumsum(-1)
    place = _crossing(cumulative, target_of(u, cumulative[:, -1]))
    return candidates.ids.gather(1, order.gather(1, place)).squeeze(1)


def sample_weights(weights: Tensor, u: Tensor) -> Tensor:
    """Sample by weights [N, V] int64, in the order of token ids: first the block, then the token within the block.
    u [N] float64 -> [N] int64."""
    sums = block_sum(weights)
    cumulative = sums.cumsum(-1)
    target = target_of(u, cumulative[:, -1])
    block = _crossing(cumulative, target)
    before = (cumulative.gather(1, block) - sums.gather(1, block)).squeeze(1)
    values, ids = take_blocks(weights, block, fill=0)
    place = _crossing(values.cumsum(-1), target - before)
    return ids.gather(1, place).squeeze(1).clamp(max=weights.shape[1] - 1)


def _crossing(cumulative: Tensor, target: Tensor) -> Tensor:
    """First place [N, 1] whose cumulative weight [N, K] exceeds the target [N]."""
    return (cumulative <= target.unsqueeze(1)).sum(-1, keepdim=True).clamp(max=cumulative.shape[1] - 1)
