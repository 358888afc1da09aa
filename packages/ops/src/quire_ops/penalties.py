"""Repetition, presence and frequency penalties on logits.

The tokens that were there before are read from the rows' history where it is, on the device, and counted anew in each
step: so nothing has to be kept when drafts are rejected, requests preempted or rows given to others.

Shape legend: R rows, L token slots of a row, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_ops.op import op

__all__ = ["Penalize", "PenaltyTable", "penalize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyTable:
    """What is kept of all rows [R]. Never moves: backends may hold addresses."""

    repetition: Tensor
    """float32, above 0; 1 changes nothing."""
    presence: Tensor
    """float32; 0 changes nothing."""
    frequency: Tensor
    """float32; 0 changes nothing."""
    num_prompt_tokens: Tensor
    """int64: tokens from this position on are outputs."""


Penalize = Callable[[Tensor, Tensor, Tensor, Tensor, PenaltyTable], None]
"""A backend's function of op `penalize`."""


@op
def penalize(logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, table: PenaltyTable) -> None:
    """Penalize tokens that were there before, in place.

    The logit of each token in prompt or output is divided by the repetition penalty if positive, multiplied if not
    (CTRL, Keskar et al. 2019, section 4.1). Then presence is subtracted once and frequency per occurrence, for
    tokens in the output only. Each is one float32 operation, in this order.
    Optional: where no backend has it, quire_sampling does it with torch, for the same logits.

    Args:
        logits: [N, V] float32, contiguous; changed in place.
        rows: [N] int64, the row of `table` and of `token_ids` of each.
        positions: [N] int64, position of the last known token; later places of the history count for nothing.
        token_ids: [R, L] int32. Ids outside the vocabulary have no logit to change.
        table: Penalties.
    """
    vocab_size = logits.shape[1]
    for i, row in enumerate(rows.tolist()):
        history = token_ids[row, : int(positions[i]) + 1].to(torch.int64)
        is_output = torch.arange(len(history), device=history.device) >= table.num_prompt_tokens[row]
        in_vocabulary = (history >= 0) & (history < vocab_size)
        seen = history[in_vocabulary].unique()
        count = history[in_vocabulary & is_output].bincount(minlength=vocab_size)[seen].to(torch.float32)
        value, factor = logits[i, seen], table.repetition[row]
        value = torch.where(value > 0, value / factor, value * factor)
        value = value - table.presence[row] * (count > 0)
        logits[i, seen] = value - table.frequency[row] * count
