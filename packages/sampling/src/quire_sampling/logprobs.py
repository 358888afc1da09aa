"""Log probabilities of the raw logits: before bias, penalties, masks and temperature, as OpenAI and vLLM do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import TokenLogprobs
from quire_sampling.blocks import block_max, block_sum
from quire_sampling.top import top_tokens

__all__ = ["LogprobTensors", "prompt_logprobs", "token_logprobs"]

_CHUNK_ROWS = 8
_DEVICE_CHUNK_ROWS = 64  # fewer, larger launches


class LogprobTensors(NamedTuple):
    """Log probabilities still on the device: `token_*` [N] of the given token, `top_*` [N, k] of the best ones, or of
    others that were named."""

    token_ids: Tensor
    token_logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def naming(self, logits: Tensor, token_ids: Mapping[int, Tensor]) -> LogprobTensors:
        """The same with other tokens in place of the best ones, in some rows.

        Args:
            logits: [N, V] float32, as for `token_logprobs`.
            token_ids: Row -> [M] int64, M at most k.
        """
        top_ids, top_logprobs = self.top_ids.clone(), self.top_logprobs.clone()
        for row, ids in token_ids.items():
            one = logits[row : row + 1]
            top_ids[row, : len(ids)] = ids
            top_logprobs[row, : len(ids)] = (one[0, ids] - _normalizer(one, block_max(one))[0]).to(torch.float32)
        return self._replace(top_ids=top_ids, top_logprobs=top_logprobs)

    def to_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One object per row; row i gets the `num_top[i]` best tokens (at most k)."""
        token_ids, logprobs, ranks = self.token_ids.tolist(), self.token_logprobs.tolist(), self.ranks.tolist()
        top_ids, top_logprobs = self.top_ids.tolist(), self.top_logprobs.tolist()
        return [
            TokenLogprobs(
                token_ids=[token_ids[i], *top_ids[i][:k]],
                logprobs=[logprobs[i], *top_logprobs[i][:k]],
                rank=ranks[i],
            )
            for i, k in enumerate(num_top)
        ]


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobTensors:
    """Log-softmax at the given tokens and at the k most likely ones.

    Args:
        logits: [N, V] float32; not changed.
        token_ids: [N] int64.
        k: From 0 to V.

    Returns:
        Tensors on the device. Equal logits are ordered by lower id, in `top_ids` and in `ranks` (1 is the best).
        A token of logit -inf has log probability -inf.
    """
    size = _CHUNK_ROWS if logits.device.type == "cpu" else _DEVICE_CHUNK_ROWS
    starts = range(0, len(logits), size)
    chunks = [_chunk_logprobs(logits[at : at + size], token_ids[at : at + size], k) for at in starts]
    return LogprobTensors(*map(torch.cat, zip(*chunks, strict=True)))


def _chunk_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobTensors:
    maxima = block_max(logits)
    normalizer = _normalizer(logits, maxima)
    ids = token_ids.unsqueeze(1)
    own = logits.gather(1, ids)
    if k > 0:
        top_values, top_ids = top_tokens(logits, k, maxima)
    else:
        top_values, top_ids = logits[:, :0], token_ids.new_empty((len(logits), 0))
    return LogprobTensors(
        token_ids,
        (own - normalizer).squeeze(1).to(torch.float32),
        _ranks(logits, own, ids),
        top_ids,
        (top_values - normalizer).to(torch.float32),
    )


def _normalizer(logits: Tensor, maxima: Tensor) -> Tensor:
    """What to subtract from logits: [N, 1] float64."""
    max_logits = maxima.amax(-1, keepdim=True)
    return max_logits + block_sum((logits - max_logits).exp_()).sum(-1, keepdim=True).log()


def _ranks(logits: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """1 + number of tokens before this one in the order (larger logit, lower id): [N] int64."""
    is_lower = torch.arange(logits.shape[1], device=logits.device) < ids
    before = (logits > own) | ((logits == own) & is_lower)
    return block_sum(before.to(torch.float32)).sum(-1).to(torch.int64) + 1  # float sums are the fast ones, and exact


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """Log probabilities of prompt tokens: logits of position i judge the token at i + 1.

    Works in pieces of 8 positions, so that the memory beyond the logits stays bounded.

    Args:
        logits: [N, V] float32 (other floats are converted piece by piece); not changed.
        next_token_ids: [N] int64, the prompt's token after each position.
        k: How many of the most likely tokens, at most V.

    Returns:
        One per position, in order.
    """
    k = min(k, logits.shape[1])
    result: list[TokenLogprobs] = []
    for start in range(0, len(logits), _CHUNK_ROWS):
        piece = logits[start : start + _CHUNK_ROWS].to(torch.float32)
        ids = next_token_ids[start : start + _CHUNK_ROWS].to(torch.int64)
        result += _chunk_logprobs(piece, ids, k).to_host([k] * len(piece))
    return result
