"""The k largest logits of each row in a fixed order: larger first, lower token id first among equals.

`torch.topk` promises no order among equal values, and equal logits are common (bfloat16 models); a request's tokens
must not depend on such chance. Here each logit and its id become one distinct 64-bit key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_sampling.blocks import block_max, take_blocks

__all__ = ["top_tokens"]

_LOW_32 = 0xFFFFFFFF


def top_tokens(logits: Tensor, k: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest values of each row with their token ids.

    Only the k blocks with the largest maxima are looked at: each of the k largest tokens lies in one of them.

    Args:
        logits: [N, V] float32 without NaN.
        k: From 1 to V.
        maxima: `block_max(logits)` if the caller already has it.

    Returns:
        Values [N, k] float32 and ids [N, k] int64, best first, lower id first among equal values.
    """
    if maxima is None:
        maxima = block_max(logits)
    if k < maxima.shape[1]:
        blocks = _largest(maxima, torch.arange(maxima.shape[1], device=logits.device), k)
        values, ids = take_blocks(logits, blocks, fill=-torch.inf)
    else:
        values, ids = logits, torch.arange(logits.shape[1], device=logits.device)
    best = _largest(values, ids, k)
    return logits.gather(1, best), best


def _largest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Ids [N, k] of the k largest values [N, M]; `ids` is [N, M] or [M]. Places beyond the row have larger ids than
    all others, so that they lose against a real -inf."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    keys = (ordered.to(torch.int64) << 32) | (_LOW_32 - ids)
    return _LOW_32 - (keys.topk(k, dim=-1).values & _LOW_32)
