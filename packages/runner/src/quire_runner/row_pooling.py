"""`RowPooling`: rows whose prompts are pooled, in the steps of a network with a KV cache.

Their prompts are computed in chunks like all others. What pooling needs of a chunk's hidden states is taken when the
chunk has run, and what comes of them all when the last one has. Nothing is sampled for such a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from quire_interfaces.pooling import PooledOutput
from quire_interfaces.step import ModelRunnerOutput, NewRow, SchedulerOutput
from quire_pooling import Pooler
from quire_runner.pooling_runner import pooled_outputs

if TYPE_CHECKING:
    from quire_runner.alignment import AlignmentPooler

__all__ = ["RowPooler", "RowPooling"]


RowPooler: TypeAlias = "Pooler | AlignmentPooler"
"""What makes outputs of prompts that come in chunks."""


class RowPooling:
    """The pooled rows of a runner.

    Args:
        pooler: On the network's device; None takes no rows that are pooled.
    """

    def __init__(self, pooler: RowPooler | None) -> None:
        self._pooler = pooler
        self._states: dict[int, Any] = {}
        """Row -> what was taken of its chunks; `add` takes the next."""
        self._stop_token_ids: dict[int, int] = {}
        """Row -> the token that stands for its output."""

    def __bool__(self) -> bool:
        """Whether any row is pooled."""
        return bool(self._states)

    def fill(self, new: NewRow) -> None:
        """A request entered its row, anew after a preemption.

        Raises:
            RequestError: it cannot be pooled as it asks.
            ValueError: this runner pools nothing.
        """
        if new.pooling_params is None:
            return
        if self._pooler is None:
            raise ValueError("this runner was made without a pooler")
        self._states[new.row] = self._pooler.begin(new.pooling_params)
        self._stop_token_ids[new.row] = min(new.stop_token_ids)

    def free(self, row: int) -> None:
        """The row is empty."""
        self._states.pop(row, None)
        self._stop_token_ids.pop(row, None)

    def without_samples(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step in which nothing is sampled for the pooled rows."""
        samples = [
            samples and row not in self._states for row, samples in zip(output.rows, output.samples, strict=True)
        ]
        return replace(output, samples=samples)

    def add(self, rows: Sequence[int], query_lens: Sequence[int], hidden: Tensor, token_ids: Tensor) -> None:
        """Take the hidden states of a step that has run.

        Args:
            rows: Row of each entry.
            query_lens: Number of tokens of each entry.
            hidden: Hidden states [T, hidden_size] of the entries' tokens, behind the last norm.
            token_ids: [T] int64.
        """
        begin = 0
        for row, length in zip(rows, query_lens, strict=True):
            end = begin + length
            if (state := self._states.get(row)) is not None:
                state.add(hidden[begin:end], token_ids[begin:end], begin)
            begin = end

    def finish(self, output: SchedulerOutput) -> Callable[[ModelRunnerOutput], None]:
        """Pool the rows whose prompts end with this step.

        Args:
            output: The step, as the scheduler planned it.

        Returns:
            What waits for their outputs and puts them into the step's result.
        """
        entries = [
            entry
            for entry, (row, samples) in enumerate(zip(output.rows, output.samples, strict=True))
            if samples and row in self._states
        ]
        if not entries:
            return lambda result: None
        assert self._pooler is not None
        rows = [output.rows[entry] for entry in entries]
        pooled = self._pooler.finish([self._states[row] for row in rows])
        stop_token_ids = [self._stop_token_ids[row] for row in rows]

        def put(result: ModelRunnerOutput) -> None:
            outputs: list[PooledOutput] = pooled_outputs(pooled)
            result.pooled = dict(zip(rows, outputs, strict=True))
            for entry, token_id in zip(entries, stop_token_ids, strict=True):
                result.sampled_token_ids[entry] = [token_id]

        return put
