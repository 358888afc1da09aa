"""Repetition, presence and frequency penalties, in time and memory proportional to the history, not the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_penalties_"]


def apply_penalties_(
    logits: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    num_prompt_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalize tokens that were there before, in place.

    Repetition (CTRL, Keskar et al. 2019, section 4.1): the logit of each token in prompt or output is divided by
    the penalty if positive, multiplied if not. Then presence is subtracted once and frequency per occurrence, for
    tokens in the output only.

    Args:
        logits: [N, V] float32, changed in place.
        token_ids: [N, max_model_len] integer, the token history of each logit row.
        positions: [N] int64, position of the last known token; later places of the history are not read.
        num_prompt_tokens: [N] int64.
        repetition: [N] float32, and so are the next two.
        presence: See above.
        frequency: See above.
    """
    length = int(positions.max()) + 1
    places = torch.arange(length, device=logits.device)
    known = places <= positions.unsqueeze(1)
    # Unknown places repeat the first token, with count 0: every place then holds a token that may be written to, and
    # equal tokens get equal values, so that the scatter does not depend on the order of its writes.
    history = token_ids[:, :length].to(torch.int64)
    history = torch.where(known, history, history[:, :1])
    is_output = known & (places >= num_prompt_tokens.unsqueeze(1))
    count = torch.zeros_like(logits).scatter_add_(1, history, is_output.to(logits.dtype)).gather(1, history)

    value = logits.gather(1, history)
    factor = repetition.unsqueeze(1)
    value = torch.where(value > 0, value / factor, value * factor)
    value = value - presence.unsqueeze(1) * (count > 0) - frequency.unsqueeze(1) * count
    logits.scatter_(1, history, value)
