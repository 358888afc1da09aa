"""DRY ("don't repeat yourself"): a penalty for the token that would go on with a sequence that was there before.

Source of the definition: P. E. Weidmann, text-generation-webui pull request 5677 (2024). The longer the repetition, the
larger the penalty: multiplier * base ** (length - allowed_length), subtracted from the logit.

Shapes: V vocabulary, L tokens looked at, M places of the last token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import SamplingParams

__all__ = ["Dry", "apply_dry_"]

_LONGEST = 50
"""Longer repetitions are penalized like one of this length, as by the method's author: the power would overflow."""


class Dry(NamedTuple):
    """DRY of one row."""

    multiplier: float
    base: float
    allowed_length: int
    num_tokens: int
    """How many of the latest tokens are looked at; 0 for all."""
    breakers: Tensor
    """[B] int64, token ids over which no sequence reaches."""

    @classmethod
    def of(cls, params: SamplingParams, breakers: Tensor) -> Dry:
        return cls(params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_range, breakers)


def apply_dry_(logits: Tensor, dry: Dry, history: Tensor, position: int) -> None:
    """Penalize, in place.

    Args:
        logits: [V] float32.
        dry: What the row wants.
        history: [max_model_len] integer, the row's token ids; valid up to and with `position`.
        position: Sequence position of the last known token.
    """
    start = max(0, position + 1 - dry.num_tokens) if dry.num_tokens else 0
    tokens = history[start : position + 1].to(torch.int64)
    last = len(tokens) - 1
    is_breaker = torch.isin(tokens, dry.breakers)
    if last < 1 or bool(is_breaker[last]):
        return
    # Places where the last token stood before, and what followed there; their matches are extended backwards.
    places = (tokens[:last] == tokens[last]).nonzero().squeeze(1)
    places = places[~is_breaker[places + 1]]
    lengths = torch.ones_like(places)
    going = torch.arange(len(places), device=places.device)
    for length in range(1, min(_LONGEST, last + 1)):
        going = going[places[going] >= length]
        if len(going) == 0 or bool(is_breaker[last - length]):
            break
        going = going[tokens[places[going] - length] == tokens[last - length]]
        lengths[going] = length + 1
    excess = lengths - dry.allowed_length
    penalties = torch.where(excess >= 0, dry.multiplier * dry.base ** excess.to(torch.float64), 0.0)
    # A token may follow at several places: the longest match counts.
    worst = torch.zeros_like(logits)
    worst.scatter_reduce_(0, tokens[places + 1], penalties.to(logits.dtype), "amax")
    logits.sub_(worst)
