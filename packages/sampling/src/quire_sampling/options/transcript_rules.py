"""What a transcript may hold (Radford et al. 2022, sec. 2.3 and 4.5): times of segments in pairs that do not go back,
no tokens that are never said. `extra_args={"transcript_rules": {...}}`, as `quire_speech` writes it.

Shapes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import RequestError, SamplingParams
from quire_sampling.option import EditOption, EditStage, RequestContext, RowLogits, Vocabulary

__all__ = ["OPTIONS"]

_PARAM = "extra_args.transcript_rules"
_NUMBERS = ("begin", "end_of_text", "timestamp_begin")


@dataclass(frozen=True, slots=True)
class _Rules:
    begin: int
    """Position of the first token of the transcript."""
    end_of_text: int
    timestamp_begin: int
    """Token of the time 0; those behind it are 20 ms later each."""
    timestamps: bool
    """Whether there are times; else none is ever written."""
    max_initial_timestamp: int
    """The first time is at most this one."""
    suppressed: Tensor
    """Tokens that are never written, [N] int64."""
    suppressed_at_begin: Tensor
    """Tokens that no transcript begins with, [N] int64."""


def _compile(params: SamplingParams, context: RequestContext) -> _Rules | None:
    given: Any = (params.extra_args or {}).get("transcript_rules")
    return None if given is None else _read(given, context.vocabulary)


def _read(given: Any, vocabulary: Vocabulary) -> _Rules:
    """The rules as a request sends them. Raises RequestError."""
    if not isinstance(given, dict):
        raise RequestError(f"{_PARAM} must be an object, got {given!r:.100}", param=_PARAM)
    numbers: dict[str, int] = {}
    for name in (*_NUMBERS, "max_initial_timestamp"):
        value: Any = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{_PARAM}.{name} must be a whole number of at least 0, got {value!r:.99}", param=_PARAM)
        numbers[name] = value
    vocabulary.check(_PARAM, [numbers["end_of_text"]])
    if not numbers["timestamp_begin"] <= vocabulary.size:
        raise RequestError(f"{_PARAM}.timestamp_begin is behind the vocabulary's end", param=_PARAM)
    return _Rules(
        begin=numbers["begin"],
        end_of_text=numbers["end_of_text"],
        timestamp_begin=numbers["timestamp_begin"],
        max_initial_timestamp=numbers["max_initial_timestamp"],
        timestamps=bool(given.get("timestamps", True)),
        suppressed=vocabulary.ids(_PARAM, given.get("suppressed", ())),
        suppressed_at_begin=vocabulary.ids(_PARAM, given.get("suppressed_at_begin", ())),
    )


def _apply(rules: _Rules, row: RowLogits) -> None:
    """Take out what may not come next; text as well, where all times together are more probable than any text."""
    logits = row.logits
    written: list[int] = row.history[rules.begin : int(row.position) + 1].tolist()
    logits.index_fill_(0, rules.suppressed, -torch.inf)
    if not written:
        logits.index_fill_(0, rules.suppressed_at_begin, -torch.inf)
    first = rules.timestamp_begin
    if not rules.timestamps:
        logits[first:] = -torch.inf
        return
    if not written:
        logits[:first] = -torch.inf
        logits[first + rules.max_initial_timestamp + 1 :] = -torch.inf
        return
    is_time = written[-1] >= first
    closes_pair = is_time and (len(written) < 2 or written[-2] >= first)
    if closes_pair:
        logits[first:] = -torch.inf
        return
    if is_time:
        logits[: rules.end_of_text] = -torch.inf
    last = max((token for token in written if token >= first), default=-1)
    if last >= 0:  # a second time of a pair may be the first one again
        logits[first : last + (0 if is_time else 1)] = -torch.inf
    if len(logits) > first and torch.logsumexp(logits[first:], 0) > logits[:first].max():
        logits[:first] = -torch.inf


OPTIONS = (
    EditOption(name="transcript_rules", stage=EditStage.EXCLUDE, compile=_compile, apply=_apply, is_observed=True),
)
