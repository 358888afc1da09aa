"""DRY ("don't repeat yourself"): a penalty for the token that would go on with a sequence that was there before.

Source of the definition: P. E. Weidmann, text-generation-webui pull request 5677 (2024). The longer the repetition, the
larger the penalty: multiplier * base ** (length - allowed_length), subtracted from the logit.

Shapes: V vocabulary, L tokens looked at, M places of the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import RequestError, SamplingParams
from quire_sampling.option import EditOption, EditStage, RequestContext, RowLogits

__all__ = ["OPTIONS"]

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


def _compile(params: SamplingParams, context: RequestContext) -> Dry | None:
    if params.dry_multiplier <= 0:
        return None
    breakers = context.vocabulary.ids("dry_sequence_breakers", _only_ids(params.dry_sequence_breakers))
    return Dry(params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_range, breakers)


def _only_ids(breakers: Sequence[str | int]) -> list[int]:
    texts = [each for each in breakers if isinstance(each, str)]
    if texts:
        raise RequestError(
            f"dry_sequence_breakers holds the text {texts[0]!r}, and the sampler knows no tokenizer: give token ids",
            param="dry_sequence_breakers",
        )
    return [each for each in breakers if isinstance(each, int)]


def _apply(dry: Dry, row: RowLogits) -> None:
    """Penalize the tokens that would repeat a sequence, in place."""
    position = int(row.position)
    start = max(0, position + 1 - dry.num_tokens) if dry.num_tokens else 0
    tokens = row.history[start : position + 1].to(torch.int64)
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
    worst = torch.zeros_like(row.logits)
    worst.scatter_reduce_(0, tokens[places + 1], penalties.to(row.logits.dtype), "amax")
    row.logits.sub_(worst)


OPTIONS = (EditOption(name="dry_multiplier", stage=EditStage.PENALIZE, compile=_compile, apply=_apply),)
