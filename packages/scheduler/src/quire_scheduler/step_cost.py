"""What steps cost: their measured times, fitted to the rows and prompt tokens that they compute."""

from __future__ import annotations

from typing import NamedTuple

from quire_interfaces import ModelRunnerOutput, SchedulerOutput

__all__ = ["StepCost", "StepCostModel", "StepTimer"]

_DECAY = 0.998
"""Weight of a step against the next one: what counts are the last 500."""
_ORIGIN_WEIGHT = 0.01
"""Weight of the origin (nothing computed, no time taken) against all steps: while all steps are alike, their time is
taken for that of their rows."""
_STEPS_PER_FIT = 16
_CHUNK = 32
"""Of so many prompt tokens: a step weighs an eighth of one without any, where weights are by size."""
_FIRST_FITS = (1, 2, 4, 8)
"""Steps after which early fits are made."""


class StepCost(NamedTuple):
    """Seconds of a step: of the step itself, of each row in it, and of each further token.

    A row's first token is counted with the row, of a prompt too; all others as prompt tokens, drafts included, which
    are computed like them.
    """

    fixed: float
    per_row: float
    per_prompt_token: float


class StepCostModel:
    """Fits `StepCost` to the steps that were measured, by least squares in which older steps weigh less.

    Args:
        is_early: Whether to fit after the first steps too, and after each with more prompt tokens than any before.
            Steps with many prompt tokens weigh less then: one that was slow by chance is soon outweighed by chunks.
    """

    def __init__(self, *, is_early: bool = False) -> None:
        self._is_early = is_early
        self._moments = [[0.0] * 3 for _ in range(3)]
        """Weighted sums of products of (1, rows, prompt tokens), shape [3, 3]."""
        self._time_moments = [0.0] * 3
        self._num_steps = 0
        self._most_prompt_tokens = 0
        self.cost: StepCost | None = None
        """None before the first fit."""

    def add(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Take in a step. What was held up by something else counts as at most twice as long as the fit says; a fit
        that says nothing of such steps is no measure of them."""
        inputs = (1.0, float(num_rows), float(num_prompt_tokens))
        is_larger = self._is_early and num_prompt_tokens > self._most_prompt_tokens
        if self.cost is not None and not is_larger:
            predicted_s = sum(each * count for each, count in zip(self.cost, inputs, strict=True))
            seconds = min(seconds, 2 * predicted_s) if predicted_s > 0 else seconds
        weight = (1 + num_prompt_tokens / _CHUNK) ** -3 if self._is_early else 1.0
        for i, first in enumerate(inputs):
            self._time_moments[i] = self._time_moments[i] * _DECAY + weight * first * seconds
            row = self._moments[i]
            for j, second in enumerate(inputs):
                row[j] = row[j] * _DECAY + weight * first * second
        self._most_prompt_tokens = max(self._most_prompt_tokens, num_prompt_tokens)
        self._num_steps += 1
        is_first = self._is_early and self._num_steps in _FIRST_FITS
        if self._num_steps % _STEPS_PER_FIT == 0 or is_first or is_larger:
            self.cost = self._fit()

    def _fit(self) -> StepCost:
        """Solve the normal equations; a coefficient below 0 is taken for 0, and the others are fitted without it."""
        used = [0, 1, 2] if self._moments[2][2] > 0 else [0, 1]
        while True:
            solved = dict(zip(used, self._solve(used), strict=True))
            negative = [index for index in used if solved[index] < 0]
            if not negative:
                return StepCost(*(solved.get(index, 0.0) for index in range(3)))
            used.remove(min(negative, key=lambda index: solved[index] * self._moments[index][index] ** 0.5))

    def _solve(self, used: list[int]) -> list[float]:
        """Gaussian elimination; the matrix is positive definite by what is added to its diagonal."""
        rows = []
        for i in used:
            row = [self._moments[i][j] for j in used]
            origin = _ORIGIN_WEIGHT if i == 0 else 1e-9
            row[used.index(i)] *= 1 + origin
            rows.append([*row, self._time_moments[i]])
        for pivot, pivot_row in enumerate(rows):
            for other in rows[pivot + 1 :]:
                factor = other[pivot] / pivot_row[pivot]
                for column in range(pivot, len(pivot_row)):
                    other[column] -= factor * pivot_row[column]
        solution = [0.0] * len(rows)
        for pivot in reversed(range(len(rows))):
            known = sum(rows[pivot][column] * solution[column] for column in range(pivot + 1, len(rows)))
            solution[pivot] = (rows[pivot][-1] - known) / rows[pivot][pivot]
        return solution


class StepTimer:
    """Measures steps: from when one was planned, or the one before it ended, to its end. Times are seconds of one
    clock.

    Args:
        is_early: As of `StepCostModel`.
    """

    def __init__(self, *, is_early: bool = False) -> None:
        self.costs = StepCostModel(is_early=is_early)
        self._planned: dict[int, tuple[float, int, int]] = {}
        """Step -> when it was planned, its rows and its prompt tokens."""
        self._last_ended_s = 0.0

    def planned(self, output: SchedulerOutput, now_s: float) -> None:
        """A step was planned."""
        num_rows = len(output.rows)
        self._planned[output.step_id] = now_s, num_rows, output.total_num_scheduled_tokens - num_rows

    def ended(self, result: ModelRunnerOutput, now_s: float) -> None:
        """The result of a step is there."""
        planned_s, num_rows, num_prompt_tokens = self._planned.pop(result.step_id)
        if num_rows:
            self.costs.add(num_rows, num_prompt_tokens, now_s - max(planned_s, self._last_ended_s))
        self._last_ended_s = now_s

    def discarded(self, output: SchedulerOutput) -> None:
        """A step failed: it says nothing of time."""
        self._planned.pop(output.step_id, None)
