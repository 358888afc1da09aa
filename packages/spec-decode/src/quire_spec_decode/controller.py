"""How many tokens to draft: what brings the most tokens a second, by measurement.

A longer draft brings more tokens when it is right and costs more when it is wrong; where the balance lies depends on
the machine, on the batch (verification is nearly free while weights are what is read) and on the text. So a few lengths
are tried, none first, and the best one is kept until the next trial; each size of batch has a balance of its own.
What trials lose is counted, for all sizes of batch together: after one that lost, no other begins before it is a
hundredth of the time. What was measured before the first request (`learn_costs`) says which lengths could not pay if
all drafts were right, which are not tried, and how soon a first trial is cheap.

Knows steps, tokens and seconds; does not know who drafts, nor clocks: whoever runs steps measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
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
HOPELESS = 0.4
"""A trial of a length ends early if n counted steps, 2 at least, bring less than 1 - HOPELESS / n of the plain rate; or
after a step so long that it would not pay if all of its drafts had been right."""
TRIAL_SHARE = 0.01
"""Share of the time that trials have lost at most when another one begins."""
FIRST_TOKENS = 16
"""The very first trial of a drafter that begins with the first prompts ends after so many: what plain steps take is not
known yet, and drafting may take several times as long."""
_WAIT_STEPS = 16
"""Until it is looked again whether a trial may begin."""
_DECAY = 0.9
_QUIET = 0.15


@dataclass(slots=True)
class _Rate:
    """Tokens and seconds, the recent ones counting more."""

    tokens: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds
        self.num_steps += 1

    def fade(self) -> None:
        """What was measured long ago says little."""
        self.tokens, self.seconds, self.num_steps = self.tokens / 4, self.seconds / 4, 0

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
    """What the last trial found; None before it ended."""
    in_trial: bool = True
    num_uncounted: int = 1
    """Steps that do not count, because the present length has just begun."""
    plain_step_s: float = 0.0
    waiting: tuple[int, int] | None = None
    """Length and steps that begin with the next prompts."""


@dataclass(slots=True)
class DraftController:
    """Chooses draft lengths. One thread calls everything.

    Args:
        max_tokens: The longest draft, at least 1.
        catches_up: Whether the drafter can be asked about a request after steps that it did not see. If not (heads that
            read the model's hidden states), drafting begins with prompts: with the first ones, so that prefixes which
            stay cached have been seen, and after plain steps with the next ones.

    Raises:
        ConfigError: max_tokens is less.
    """

    max_tokens: int
    catches_up: bool = True
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _accepted: dict[int, float] = field(default_factory=dict)
    _costs: dict[int, tuple[int, dict[int, float]]] = field(default_factory=dict)
    """Size -> rows of the steps that were measured, and length -> seconds."""
    _time_s: float = 0.0
    _lost_s: float = 0.0
    """What trials have cost more than plain steps would have."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}", field="num_speculative_tokens")

    @property
    def lengths(self) -> tuple[int, ...]:
        """What is tried, none first."""
        return tuple(sorted({0, (self.max_tokens + 1) // 2, self.max_tokens}))

    def learn_costs(self, num_rows: int, seconds: Mapping[int, float]) -> bool:
        """What steps took that were run for nobody. Before the first step, smaller batches first.

        Args:
            num_rows: Requests in the steps.
            seconds: Length -> seconds of a step with such drafts, drafting for the next one included; 0 among them.

        Returns:
            Whether drafting could pay for so many. If not, there is nothing to learn about more.
        """
        size = num_rows.bit_length()
        self._costs[size] = (num_rows, dict(seconds))
        return any(self._can_pay(size, length) for length in self.lengths if length)

    def choose(self, num_rows: int) -> int:
        """Draft tokens for the step at hand; call it once per step that decodes.

        Args:
            num_rows: Requests in the step.
        """
        batch = self._batch(num_rows)
        if batch.num_steps == 0:
            self._go_on(batch)
        batch.num_steps -= 1
        if not batch.in_trial and batch.length == 0:
            self._time_s += batch.plain_step_s
        return batch.length

    def present(self, num_rows: int) -> int:
        """What `choose` said last for such a batch, without counting a step."""
        return self._batch(num_rows).length

    def with_prompts(self, num_rows: int) -> int:
        """Draft tokens for a step with new prompts, which is not counted."""
        batch = self._batch(num_rows)
        if batch.waiting is not None and self._can_afford_trial:
            (batch.length, batch.num_steps), batch.waiting = batch.waiting, None
            batch.in_trial = batch.best != batch.length
        if batch.length:
            batch.num_uncounted = 0
        return batch.length

    def rests(self, num_rows: int) -> bool:
        """Whether drafting is off for such batches until the next trial: steps need not be measured."""
        batch = self._batch(num_rows)
        return not batch.in_trial and batch.length == 0 and batch.num_uncounted == 0

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

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> float:
        """The step at hand took so long, drafting for the next one included, and gave so many tokens.

        Returns:
            Seconds that it saved against plain steps, less than 0 where it lost; 0 while these were not measured.
        """
        batch = self._batch(num_rows)
        plain = batch.rates[0].value
        saved_s = num_tokens / plain - seconds if plain and (batch.length or batch.num_uncounted) else 0.0
        self._time_s += seconds
        if batch.in_trial:
            self._lost_s = max(0.0, self._lost_s - saved_s)
        if batch.num_uncounted:
            batch.num_uncounted -= 1
            return saved_s
        rate = batch.rates[batch.length]
        rate.add(num_tokens, seconds)
        if batch.length == 0:
            if not plain:  # now it is known what was lost before
                lost = (own.seconds - own.tokens / rate.value for length, own in batch.rates.items() if length)
                self._lost_s += sum(max(0.0, seconds) for seconds in lost)
            batch.plain_step_s = rate.seconds / rate.tokens * num_tokens
        elif batch.in_trial:
            at_best = num_rows * (1 + batch.length) / seconds
            if not plain and not self.catches_up and rate.tokens >= FIRST_TOKENS:
                batch.num_steps = 0
            if at_best < plain or (rate.num_steps >= 2 and rate.value < (1 - HOPELESS / rate.num_steps) * plain):
                batch.num_steps = 0
        elif rate.value < plain:
            batch.num_steps = 0  # the text has changed: try again now
        return saved_s

    def charge(self, num_rows: int, seconds: float) -> None:
        """Drafting took so long in a step with prompts, which is not observed: drafting has to earn it back."""
        batch = self._batch(num_rows)
        if batch.length:
            batch.rates[batch.length].seconds += seconds
            if batch.in_trial and batch.rates[0].seconds:
                self._lost_s += seconds

    def tokens_per_second(self, num_rows: int) -> dict[int, float]:
        """Length -> what it brought in such a batch, as far as it was measured."""
        return {length: rate.value for length, rate in self._batch(num_rows).rates.items() if rate.seconds}

    @property
    def _can_afford_trial(self) -> bool:
        return self._lost_s <= TRIAL_SHARE * self._time_s

    def _can_afford(self, size: int, length: int) -> bool:
        """Whether a trial of `length` may begin: at once where it pays if half of the drafts are right, otherwise when
        two steps whose drafts are wrong are lost in the time that has passed."""
        expected_s = 0.0
        known = [other for other in self._costs if other <= size]
        if known:
            seconds = self._costs[max(known)][1]
            more_s = seconds[length] - seconds[0]
            if WORTH_IT * (seconds[0] + more_s) > (1 + length / 2) * seconds[0]:
                expected_s = 2 * more_s
        return self._lost_s + expected_s <= TRIAL_SHARE * self._time_s

    def _batch(self, num_rows: int) -> _Batch:
        size = num_rows.bit_length()
        batch = self._batches.get(size)
        if batch is None:
            batch = self._batches[size] = self._new_batch(size)
        return batch

    def _new_batch(self, size: int) -> _Batch:
        """Nothing is known about this size. Where a smaller batch does without, a larger one has less to gain."""
        left = self._trial(0)
        if not self.catches_up and not self._time_s and self._can_pay(size, self.lengths[1]):
            left.reverse()
        batch = _Batch(rates={length: _Rate() for length in self.lengths}, left=left, length=left.pop())
        smaller = [other for other in self._batches if other < size]
        at_smaller = smaller and self._batches[max(smaller)].best == 0
        if at_smaller or not any(self._can_pay(size, length) for length in self.lengths if length):
            self._do_without(batch)
        return batch

    def _can_pay(self, size: int, length: int, plain_token_s: float = 0.0) -> bool:
        """Whether drafts of such a length would pay if all of them were right, as far as costs are known.

        Args:
            size: Of the batch. If its costs were not measured, those of the next smaller one are what it pays at least
                for each request.
            length: More than 0.
            plain_token_s: What a token takes without drafts. With long texts that is more than was measured, while what
                drafts add is about the same.
        """
        known = [other for other in self._costs if other <= size]
        if not known:
            return True
        num_rows, seconds = self._costs[max(known)]
        plain_s = max(seconds[0], plain_token_s * num_rows)
        return (1 + length) * plain_s >= WORTH_IT * (plain_s + seconds[length] - seconds[0])

    def _size_of(self, batch: _Batch) -> int:
        return next(size for size, other in self._batches.items() if other is batch)

    def _do_without(self, batch: _Batch) -> None:
        """As if a trial had found that drafting does not pay."""
        batch.best, batch.in_trial, batch.left = 0, False, self._trial(0)
        self._begin(batch, 0, FIRST_STAY_STEPS)

    def _trial(self, best: int) -> list[int]:
        """Lengths to try, the next one last, where `best` was the best so far."""
        none, *others = self.lengths
        if self.catches_up:
            tried = [none, *others]
        elif best == 0:
            tried = [none, others[0]]  # a longer one is tried once this one has won
        else:
            tried = [*reversed(others), none]
        return [length for length in reversed(tried) if length != best or best == 0]

    def _go_on(self, batch: _Batch) -> None:
        """The next length of a trial, or the best one when all were tried."""
        batch.in_trial = True
        plain, now = batch.rates[0].value, batch.rates[batch.length].value
        if batch.length and now < plain / WORTH_IT:  # what is longer costs more and is wrong more often
            batch.left = [length for length in batch.left if length < batch.length]
        size = self._size_of(batch)
        if batch.left and batch.left[-1]:  # not before the plain steps with which a trial begins
            token_s = 1 / plain if plain else 0.0
            batch.left = [length for length in batch.left if not length or self._can_pay(size, length, token_s)]
        if not batch.left:
            self._settle(batch)
        elif batch.left[-1] and not batch.length and self.catches_up and not self._can_afford(size, batch.left[-1]):
            batch.in_trial, batch.num_steps = False, _WAIT_STEPS
        else:
            length = batch.left.pop()
            batch.rates[length].fade()
            self._begin(batch, length, TRIAL_STEPS)

    def _settle(self, batch: _Batch) -> None:
        rates = {length: rate.value for length, rate in batch.rates.items()}
        best = max(rates, key=rates.__getitem__)
        if best and rates[best] < WORTH_IT * rates[0]:
            best = 0
        batch.stay = min(2 * batch.stay, LONGEST_STAY_STEPS) if best == batch.best else FIRST_STAY_STEPS
        batch.best, batch.in_trial, batch.left = best, False, self._trial(best)
        self._begin(batch, best, batch.stay)
        if best == 0:
            size = self._size_of(batch)
            for larger, other in self._batches.items():
                if larger > size and other.best is None:
                    self._do_without(other)

    def _begin(self, batch: _Batch, length: int, num_steps: int) -> None:
        if length and not batch.length and not self.catches_up:
            batch.waiting, batch.in_trial, batch.num_steps = (length, num_steps), False, -1
            return
        batch.num_uncounted = int(length != batch.length)  # the first one still carries the drafts of the length before
        batch.length, batch.num_steps = length, num_steps
