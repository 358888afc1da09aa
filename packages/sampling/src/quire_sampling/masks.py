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

__all__ = ["TokenMasks", "apply_token_masks_", "check_masks"]

_FEW = 3
"""Tokens are picked out one by one where at most one word of a mask in so many has some of them."""


class TokenMasks(NamedTuple):
    """Masks for some of a step's logit rows."""

    indices: Sequence[int]
    """[M] which logit rows, each at most once."""
    bitmask: Tensor
    """[M, W] int32, contiguous; bit i % 32 of word i // 32 is 1 where token i may be sampled. On the host, or where
    the logits are."""

    def mask_of(self, num_rows: int) -> Tensor:
        """[num_rows] int64 on the host: the mask of each logit row, -1 for none, as op `sample_masked` takes it."""
        numbers = np.full(num_rows, -1, dtype=np.int64)
        numbers[list(self.indices)] = np.arange(len(self.indices))
        return torch.from_numpy(numbers)


def apply_token_masks_(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits of all tokens that may not be sampled to -inf, in place.

    Args:
        logits: [N, V] float32, contiguous.
        masks: For some of the rows; the other rows are not touched.

    Raises:
        ValueError: the masks do not fit the logits.
    """
    check_masks(logits, masks)
    if logits.device.type == "cpu":
        for index, mask in zip(masks.indices, masks.bitmask.numpy(), strict=True):
            _apply_row(logits[index], mask.view(np.uint32))
        return
    apply_on_device_(logits, masks)


def check_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Raises ValueError when the masks do not fit the logits [N, V]."""
    num_words = -(-logits.shape[1] // 32)
    if masks.bitmask.shape != (len(masks.indices), num_words) or masks.bitmask.dtype != torch.int32:
        raise ValueError(
            f"masks for {len(masks.indices)} rows of {logits.shape[1]} tokens must be int32 "
            f"[{len(masks.indices)}, {num_words}], got {masks.bitmask.dtype} {list(masks.bitmask.shape)}"
        )


def apply_on_device_(logits: Tensor, masks: TokenMasks) -> None:
    """The same without a loop over rows and without waiting for the device; right on every device, slower on a CPU."""
    bits = masks.bitmask.to(logits.device, non_blocking=True).view(torch.uint8)
    index = torch.tensor(masks.indices, dtype=torch.int64).to(logits.device, non_blocking=True)
    logits.index_add_(0, index, _addend(bits, logits.shape[1]))


def _apply_row(row: Tensor, mask: NDArray[np.uint32]) -> None:
    """row [V] on the CPU, mask [W]. A mask that allows little, or excludes little, touches little of the mask and as
    few logits as it can; others take the table."""
    some = np.flatnonzero(mask)
    if len(some) * _FEW <= len(mask):
        ids = _ids(mask, some, len(row))
        logits = row.numpy()
        kept = logits[ids]
        logits.fill(-np.inf)
        logits[ids] = kept
        return
    excluded = ~mask
    some = np.flatnonzero(excluded)
    if len(some) * _FEW <= len(mask):
        row.numpy()[_ids(excluded, some, len(row))] = -np.inf
    else:
        row.add_(_addend(torch.from_numpy(mask.view(np.uint8)), len(row)))


def _ids(mask: NDArray[np.uint32], words: NDArray[np.intp], vocab_size: int) -> NDArray[np.intp]:
    """Tokens whose bit is set in some words of a mask."""
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little")
    places = np.flatnonzero(bits)
    ids: NDArray[np.intp] = words[places >> 5] * 32 + (places & 31)
    return ids[: np.searchsorted(ids, vocab_size)]


def _addend(bits: Tensor, vocab_size: int) -> Tensor:
    """bits [..., 4 W] uint8 -> [..., V] float32, 0 where a bit is set and -inf elsewhere; eight tokens per look-up."""
    return torch.nn.functional.embedding(bits.to(torch.int32), _table(bits.device)).flatten(-2)[..., :vocab_size]


@functools.lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """[256, 8] float32: what each byte of a mask adds to its eight tokens."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return torch.where((byte >> torch.arange(8, device=device)) & 1 == 1, 0.0, -torch.inf)
