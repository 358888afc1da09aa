"""How many tokens to draft: what brings the most tokens a second, by measurement.

A longer draft brings more tokens when it is right and costs more when it is wrong; where the balance lies depends on
the machine, on the batch (verification is nearly free while weights are what is read) and on the text. So a few lengths
are tried, none among them, and the best one is kept until the next trial; each size of batch has a balance of its own.

Knows steps, tokens and seconds; does not know who drafts, nor clocks: whoever runs steps measures them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_interfaces import ConfigError

__all__ = ["DraftController"]

TRIAL_STEPS = 6
"""Steps of one length in a trial; the first one still carries the drafts of the length before and does not count."""
FIRST_STAY_STEPS = 256
LONGEST_STAY_STEPS = 8192
"""Steps with the best length between two trials; it doubles as long as the trial changes nothing."""
WORTH_IT = 1.03
"""Drafting must bring this many times the tokens a second of not drafting."""
_DECAY = 0.9
_QUIET = 0.15


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds, the recent ones counting more."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    def fade(self) -> None:
        """What was measured long ago says little."""
        self.tokens, self.seconds = self.tokens / 4, self.seconds / 4

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Batch:
    """What is known about batches of one size."""

    rates: dict[int, _Rate]
    left: list[int]
    """Lengths still to be tried, the next one last."""
    length: int
    num_steps: int = TRIAL_STEPS
    """How long the present length stays."""
    stay: int = FIRST_STAY_STEPS
    best: int | None = None
    fresh: bool = True
    """The present length has just begun."""


@dataclass(slots=True)
class DraftController:
    """Chooses draft lengths. One thread calls everything.

    Args:
        max_tokens: The longest draft, at least 1.

    Raises:
        ConfigError: it is not.
    """

    max_tokens: int
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _accepted: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}", field="num_speculative_tokens")

    @property
    def lengths(self) -> tuple[int, ...]:
        """What is tried, none first."""
        return tuple(sorted({0, (self.max_tokens + 1) // 2, self.max_tokens}))

    def choose(self, num_rows: int) -> int:
        """Draft tokens for the step at hand; call it once per step that decodes.

        Args:
            num_rows: Requests in the step.
        """
        batch = self._batch(num_rows)
        if batch.num_steps == 0:
            self._go_on(batch)
        batch.num_steps -= 1
        return batch.length

    def present(self, num_rows: int) -> int:
        """What `choose` said last for such a batch, without counting a step."""
        return self._batch(num_rows).length

    def limit(self, row: int, length: int) -> int:
        """Draft tokens for one row in a step of such a length: one where its drafts are mostly wrong."""
        return min(length, 1) if self._accepted.get(row, 1.0) < _QUIET else length

    def verified(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """So many of a row's drafts were right."""
        if num_drafts:
            self._accepted[row] = 0.8 * self._accepted.get(row, 1.0) + 0.2 * (num_accepted / num_drafts)

    def forget(self, row: int) -> None:
        """Another request may have the row from now on."""
        self._accepted.pop(row, None)

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """The step at hand took so long, drafting for the next one included, and gave so many tokens."""
        batch = self._batch(num_rows)
        if batch.fresh:
            batch.fresh = False
            return
        batch.rates[batch.length].add(num_tokens, seconds)
        plain = batch.rates[0].value
        if batch.length and batch.length == batch.best and batch.rates[batch.length].value < plain:
            batch.num_steps = 0  # the text has changed: try again now

    def tokens_per_second(self, num_rows: int) -> dict[int, float]:
        """Length -> what it brought in such a batch, as far as it was measured."""
        return {length: rate.value for length, rate in self._batch(num_rows).rates.items() if rate.seconds}

    def _batch(self, num_rows: int) -> _Batch:
        size = num_rows.bit_length()
        batch = self._batches.get(size)
        if batch is None:
            *left, first = self.lengths
            batch = _Batch(rates={length: _Rate() for length in self.lengths}, left=left[::-1], length=first)
            self._batches[size] = batch
        return batch

    def _go_on(self, batch: _Batch) -> None:
        """The next length of a trial, or the best one when all were tried."""
        if batch.left:
            length = batch.left.pop()
            batch.rates[length].fade()
            self._begin(batch, length, TRIAL_STEPS)
            return
        rates = {length: rate.value for length, rate in batch.rates.items()}
        best = max(rates, key=rates.__getitem__)
        if best and rates[best] < WORTH_IT * rates[0]:
            best = 0
        batch.stay = min(2 * batch.stay, LONGEST_STAY_STEPS) if best == batch.best else FIRST_STAY_STEPS
        batch.best = best
        batch.left = [length for length in self.lengths if length != best]
        self._begin(batch, best, batch.stay)

    def _begin(self, batch: _Batch, length: int, num_steps: int) -> None:
        batch.fresh = length != batch.length
        batch.length, batch.num_steps = length, num_steps
