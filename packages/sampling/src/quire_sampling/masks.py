"""Token masks: which tokens of the vocabulary may be sampled, as one bit each, laid over the logits of some rows.

Shapes: N logit rows, V vocabulary, M masked rows, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TokenMasks", "apply_token_masks_"]

_FEW_BYTES = 64
"""Up to so many bytes of a mask with bits set, tokens are picked out one by one: what other rows take is a table."""


class TokenMasks(NamedTuple):
    """Masks for some of a step's logit rows."""

    indices: Sequence[int]
    """[M] which logit rows, each at most once."""
    bitmask: Tensor
    """[M, W] int32, contiguous; bit i % 32 of word i // 32 is 1 where token i may be sampled. On the host, or where
    the logits are."""


def apply_token_masks_(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits of all tokens that may not be sampled to -inf, in place.

    Args:
        logits: [N, V] float32, contiguous.
        masks: For some of the rows; the other rows are not touched.

    Raises:
        ValueError: the masks do not fit the logits.
    """
    num_words = -(-logits.shape[1] // 32)
    if masks.bitmask.shape != (len(masks.indices), num_words) or masks.bitmask.dtype != torch.int32:
        raise ValueError(
            f"masks for {len(masks.indices)} rows of {logits.shape[1]} tokens must be int32 "
            f"[{len(masks.indices)}, {num_words}], got {masks.bitmask.dtype} {list(masks.bitmask.shape)}"
        )
    if logits.device.type == "cpu":
        for index, mask in zip(masks.indices, masks.bitmask.numpy(), strict=True):
            _apply_row(logits[index], mask.view(np.uint8))
        return
    bits = masks.bitmask.to(logits.device, non_blocking=True).view(torch.uint8)
    addend = _addend(bits, logits.shape[1])
    index = torch.tensor(masks.indices, dtype=torch.int64).to(logits.device, non_blocking=True)
    logits.index_add_(0, index, addend)


def _apply_row(row: Tensor, mask: NDArray[np.uint8]) -> None:
    """row [V] on the CPU, mask [4 W]."""
    some = np.flatnonzero(mask)
    if len(some) > _FEW_BYTES:
        row.add_(_addend(torch.from_numpy(mask), len(row)))
        return
    places, bits = np.unpackbits(mask[some], bitorder="little").reshape(-1, 8).nonzero()
    ids = some[places] * 8 + bits
    index = torch.from_numpy(ids[ids < len(row)])
    kept = row[index]
    row.fill_(-torch.inf)
    row[index] = kept


def _addend(bits: Tensor, vocab_size: int) -> Tensor:
    """bits [..., 4 W] uint8 -> [..., V] float32, 0 where a bit is set and -inf elsewhere; eight tokens per look-up."""
    return torch.nn.functional.embedding(bits.to(torch.int32), _table(bits.device)).flatten(-2)[..., :vocab_size]


@functools.lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """[256, 8] float32: what each byte of a mask adds to its eight tokens."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return torch.where((byte >> torch.arange(8, device=device)) & 1 == 1, 0.0, -torch.inf)
