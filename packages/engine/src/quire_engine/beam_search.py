"""Beam search: the sequences of largest probability, as far as a beam of a few sequences sees them.

Knows no engine. Whoever drives it asks for the next tokens of each beam and says how likely they are:

    search = BeamSearch(prompt_token_ids, params, stop_token_ids)
    while not search.is_done:
        search.advance([most_likely_tokens(prompt) for prompt in search.prompts()])
    search.best()

The rules are those of Transformers' `generate(num_beams=...)`: a sequence ends only while it is among the `beam_width`
best candidates; ended ones are ranked by log probability / length ** length_penalty; without `early_stopping` the
search goes on until no beam that is still running could displace an ended one at its present length.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_interfaces import RequestError, SamplingParams

__all__ = ["Beam", "BeamSearch", "BeamSearchParams"]

MAX_BEAM_WIDTH = 32
_MAX_LENGTH_PENALTY = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Raises:
        RequestError: with `param` set, when a value is out of range.
    """

    beam_width: int = 4
    """Sequences that are followed at a time, and given back at the end; 1 to 32."""
    max_tokens: int = 16
    """Longest output."""
    length_penalty: float = 1.0
    """Sequences are ranked by their log probability / length ** this: above 0 favours long ones."""
    early_stopping: bool = False
    """Stop as soon as beam_width sequences have ended."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sequence, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the text of the token that ended a sequence."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    extra_args: dict[str, Any] | None = None
    """For custom logits processors, as of `SamplingParams`."""

    def __post_init__(self) -> None:
        for name, low, high in (("beam_width", 1, MAX_BEAM_WIDTH), ("max_tokens", 1, 2**31)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise RequestError(f"{name} must be a whole number from {low} to {high}, got {value!r}", param=name)
        penalty: Any = self.length_penalty
        is_number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
        if not is_number or not abs(penalty) <= _MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty must be from -{_MAX_LENGTH_PENALTY:g} to {_MAX_LENGTH_PENALTY:g}, got {penalty!r}",
                param="length_penalty",
            )

    def num_candidates(self, num_stop_tokens: int) -> int:
        """How many of its most likely tokens each beam must tell: enough that beam_width go on, whichever end."""
        return self.beam_width * max(2, 1 + num_stop_tokens)

    def step_params(self, num_candidates: int) -> SamplingParams:
        """What computes one step of one beam."""
        return SamplingParams(
            temperature=0,
            seed=0,
            max_tokens=1,
            logprobs=num_candidates,
            ignore_eos=True,
            extra_args=self.extra_args,
            detokenize=False,
        )


class Beam(NamedTuple):
    """One sequence."""

    token_ids: tuple[int, ...]
    """The output so far; the token that ended it is included."""
    logprob: float
    """Sum over its tokens."""
    score: float = 0.0
    """What ended sequences are ranked by."""
    is_stopped: bool = False
    """Whether a stop token ended it; else it reached max_tokens, or runs."""


class BeamSearch:
    """The state of one search.

    Args:
        prompt_token_ids: The prompt.
        params: How to search.
        stop_token_ids: All token ids that end a sequence.
    """

    def __init__(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, stop_token_ids: Collection[int] = ()
    ) -> None:
        self._prompt = list(prompt_token_ids)
        self._params = params
        self._stop_token_ids = frozenset(stop_token_ids)
        self._running = [Beam((), 0.0)]
        self._ended: list[Beam] = []
        """At most beam_width, the best one first."""
        self.num_candidates = params.num_candidates(len(self._stop_token_ids))
        self.is_done = False

    def prompts(self) -> list[list[int]]:
        """What each running beam has to be continued from."""
        return [self._prompt + list(beam.token_ids) for beam in self._running]

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> None:
        """One step.

        Args:
            continuations: Per running beam its `num_candidates` most likely tokens (or all of them), each with its log
                probability, best first.
        """
        width, length = self._params.beam_width, len(self._running[0].token_ids) + 1
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, tokens in zip(self._running, continuations, strict=True)
            for token_id, logprob in tokens
        ]
        candidates = heapq.nlargest(self.num_candidates, candidates, key=lambda beam: beam.logprob)
        is_last = length >= self._params.max_tokens
        goes_on = [beam for beam in candidates if beam.token_ids[-1] not in self._stop_token_ids]
        for beam in candidates[:width]:
            is_stopped = beam.token_ids[-1] in self._stop_token_ids
            if is_stopped or is_last:
                self._ended.append(beam._replace(score=self._score(beam.logprob, length), is_stopped=is_stopped))
        self._ended = heapq.nlargest(width, self._ended, key=lambda beam: beam.score)
        self._running = goes_on[:width]
        self.is_done = is_last or not self._running or not self._may_improve(length)

    def best(self) -> list[Beam]:
        """The sequences that ended, the best one first."""
        return list(self._ended)

    def _may_improve(self, length: int) -> bool:
        if len(self._ended) < self._params.beam_width:
            return True
        best_running = self._score(self._running[0].logprob, length)
        return not self._params.early_stopping and best_running > self._ended[-1].score

    def _score(self, logprob: float, length: int) -> float:
        score: float = logprob / length**self._params.length_penalty
        return score
