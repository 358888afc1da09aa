"""Repetition, presence and frequency penalties, in time and memory proportional to the history, not the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Penalties", "apply_penalties_"]

_CHUNK_ROWS = 64  # bounds the table of counts


class Penalties(NamedTuple):
    """Per row [N] float32. Neutral values: 1, 0, 0."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def take(self, index: Tensor) -> Penalties:
        return Penalties(self.repetition[index], self.presence[index], self.frequency[index])


def apply_penalties_(
    logits: Tensor,
    which: Tensor,
    token_ids: Tensor,
    row_index: Tensor,
    positions: Tensor,
    num_prompt_tokens: Tensor,
    penalties: Penalties,
) -> None:
    """Penalize tokens that were there before, in place.

    Repetition (CTRL, Keskar et al. 2019, section 4.1): the logit of each token in prompt or output is divided by
    the penalty if positive, multiplied if not. Then presence is subtracted once and frequency per occurrence, for
    tokens in the output only.

    Args:
        logits: [N, V] float32, contiguous; some rows are changed in place.
        which: [P] int64, the logit rows to change.
        token_ids: [max_num_seqs, max_model_len] integer, the token history by request row.
        row_index: [P] int64, the request row of each.
        positions: [P] int64, position of the last known token; later places of the history are not read.
        num_prompt_tokens: [P] int64.
        penalties: [P] each.
    """
    vocab_size = logits.shape[1]
    counts = torch.zeros(min(_CHUNK_ROWS, len(which)) * vocab_size, dtype=logits.dtype, device=logits.device)
    token_ids = token_ids[:, : int(positions.max()) + 1]
    for start in range(0, len(which), _CHUNK_ROWS):
        chunk = torch.arange(start, min(start + _CHUNK_ROWS, len(which)), device=logits.device)
        history, is_output = _history(token_ids[row_index[chunk]], positions[chunk], num_prompt_tokens[chunk])
        table_places = (history + (chunk - start).unsqueeze(1) * vocab_size).flatten()
        counts.scatter_add_(0, table_places, is_output.to(logits.dtype).flatten())
        count = counts.gather(0, table_places).view_as(history)
        counts.scatter_(0, table_places, 0.0)

        places = (history + which[chunk].unsqueeze(1) * vocab_size).flatten()
        flat = logits.view(-1)
        value = _penalized(flat.gather(0, places).view_as(history), count, penalties.take(chunk))
        flat.scatter_(0, places, value.flatten())


def _history(tokens: Tensor, positions: Tensor, num_prompt_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [P, L] -> (history [P, L] int64, which of it is output [P, L] bool).

    Unknown places repeat the first token, as part of the prompt: so every place holds a token that may be written to,
    and equal tokens get equal values, whence the result does not depend on the order of a scatter's writes.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    known = places <= positions.unsqueeze(1)
    tokens = tokens.to(torch.int64)
    return torch.where(known, tokens, tokens[:, :1]), known & (places >= num_prompt_tokens.unsqueeze(1))


def _penalized(value: Tensor, count: Tensor, penalties: Penalties) -> Tensor:
    factor = penalties.repetition.unsqueeze(1)
    value = torch.where(value > 0, value / factor, value * factor)
    return value - penalties.presence.unsqueeze(1) * (count > 0) - penalties.frequency.unsqueeze(1) * count
