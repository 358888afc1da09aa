"""Conformance suite of `quire_interfaces.Executor`: inherit it, say how to make one, get the tests.

    class TestMyExecutor(ExecutorSuite):
        def make_executor(self):
            return MyExecutor(...)

The suite drives one KV cache group with blocks of `block_size` tokens; blocks 1 to 8 must exist, rows 0 to 3 too, and
token ids below 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire_interfaces import Executor, ModelRunnerOutput, NewRow, SamplingParams, SchedulerOutput

__all__ = ["ExecutorSuite"]

_TIMEOUT_S = 30


class ExecutorSuite:
    """Steps run in order, each future belongs to its step, a failed step leaves no trace, close is final."""

    block_size = 4

    def make_executor(self) -> Executor:
        """A fresh executor."""
        raise NotImplementedError("the suite needs an executor: override make_executor")

    @pytest.fixture
    def executor(self) -> Any:
        executor = self.make_executor()
        yield executor
        executor.close()

    def prefill(self, step_id: int, rows: Sequence[int], prompt: Sequence[int], **more: Any) -> SchedulerOutput:
        """A step in which these rows are filled with `prompt` and sample; row r holds blocks 2r + 1 and 2r + 2."""
        new_rows = [
            NewRow(
                row=row,
                request_id=f"request-{row}",
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=([2 * row + 1, 2 * row + 2],),
                sampling_params=SamplingParams(temperature=0),
                seed=0,
            )
            for row in rows
        ]
        return self.entries(step_id, rows, 0, len(prompt), new_rows=new_rows, **more)

    def entries(self, step_id: int, rows: Sequence[int], start: int, num: int, **more: Any) -> SchedulerOutput:
        """A step that computes `num` tokens from `start` in each row, and samples."""
        return SchedulerOutput(
            step_id=step_id,
            rows=list(rows),
            request_ids=[f"request-{row}" for row in rows],
            num_computed_tokens=[start] * len(rows),
            num_scheduled_tokens=[num] * len(rows),
            samples=[True] * len(rows),
            total_num_scheduled_tokens=num * len(rows),
            **more,
        )

    def run(self, executor: Executor, output: SchedulerOutput) -> ModelRunnerOutput:
        return executor.execute(output).result(timeout=_TIMEOUT_S)

    def test_every_sampling_entry_gets_a_token(self, executor: Executor) -> None:
        result = self.run(executor, self.prefill(0, [2, 0], [1, 2, 3]))
        assert result.step_id == 0
        assert [len(tokens) for tokens in result.sampled_token_ids] == [1, 1]
        assert result.failed_rows == {}

    def test_an_entry_that_does_not_sample_gets_none(self, executor: Executor) -> None:
        output = self.prefill(0, [1], [1, 2, 3, 4, 5])
        output.samples, output.num_scheduled_tokens, output.total_num_scheduled_tokens = [False], [2], 2
        assert self.run(executor, output).sampled_token_ids == [[]]
        assert len(self.run(executor, self.entries(1, [1], 2, 3)).sampled_token_ids[0]) == 1

    def test_steps_handed_out_ahead_find_the_tokens_before_them(self, executor: Executor) -> None:
        steps = [self.prefill(0, [0], [1, 2]), *(self.entries(i, [0], 1 + i, 1) for i in range(1, 5))]
        ahead = []
        futures = []
        for step in steps:
            futures.append(executor.execute(step))
            if len(futures) == 2:
                ahead.append(futures.pop(0).result(timeout=_TIMEOUT_S))
        ahead += [future.result(timeout=_TIMEOUT_S) for future in futures]
        assert [result.step_id for result in ahead] == list(range(5))
        free = SchedulerOutput(
            step_id=5,
            rows=[],
            request_ids=[],
            num_computed_tokens=[],
            num_scheduled_tokens=[],
            samples=[],
            freed_rows=[0],
        )
        self.run(executor, free)
        one_by_one = [self.run(executor, self.prefill(6, [0], [1, 2]))]
        one_by_one += [self.run(executor, self.entries(6 + i, [0], 1 + i, 1)) for i in range(1, 5)]
        assert [r.sampled_token_ids for r in ahead] == [r.sampled_token_ids for r in one_by_one]

    def test_a_step_without_entries(self, executor: Executor) -> None:
        self.run(executor, self.prefill(0, [3], [1, 2]))
        output = self.entries(1, [], 0, 0, freed_rows=[3])
        result = self.run(executor, output)
        assert result.step_id == 1
        assert result.sampled_token_ids == []

    def test_a_row_is_freed_and_filled_by_the_same_step(self, executor: Executor) -> None:
        first = self.run(executor, self.prefill(0, [1], [1, 2, 3]))
        self.run(executor, self.prefill(1, [1], [4, 5], freed_rows=[1]))
        again = self.run(executor, self.prefill(2, [1], [1, 2, 3], freed_rows=[1]))
        assert again.sampled_token_ids == first.sampled_token_ids

    def test_a_step_that_raises_leaves_history_as_it_was(self, executor: Executor) -> None:
        self.run(executor, self.prefill(0, [0], [1, 2]))
        # Position 3 was never sampled: whatever planned this lost a step.
        error = executor.execute(self.entries(1, [0], 3, 1)).exception(timeout=_TIMEOUT_S)
        assert isinstance(error, Exception)
        after = self.run(executor, self.entries(2, [0], 2, 1))
        self.run(executor, self.prefill(3, [0], [1, 2], freed_rows=[0]))
        undisturbed = self.run(executor, self.entries(4, [0], 2, 1))
        assert after.sampled_token_ids == undisturbed.sampled_token_ids

    def test_close_is_final_and_idempotent(self) -> None:
        executor = self.make_executor()
        self.run(executor, self.prefill(0, [0], [1, 2]))
        executor.close()
        executor.close()
        with pytest.raises(Exception, match="clos"):
            executor.execute(self.entries(1, [0], 2, 1)).result(timeout=_TIMEOUT_S)
