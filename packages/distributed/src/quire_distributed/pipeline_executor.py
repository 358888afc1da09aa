"""`PipelineExecutor`: rank 0 of an engine here, the other ranks in processes; several steps on their way through the
pipeline stages at once.

Rank 0 is on the first stage: it computes its layers in the caller's thread and is ready for the next step, while the
stages behind compute this one. The result comes from the last stage; what was sampled there is told to the other
stages before the next step. Knows processes and steps; knows no network, and loads no torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from quire_distributed.collectives import Collectives
from quire_distributed.mesh import Mesh
from quire_distributed.rank_executor import IDLE_S, STUCK_S, RankExecutor
from quire_distributed.rank_handle import AGREE_S, RankHandle
from quire_interfaces import RankDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["PipelineExecutor", "RunsStage"]


class RunsStage(Protocol):
    """Rank 0's runner."""

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the first stage of a step; raises what that raised."""

    def take_sampled(self, step_id: int, rows: Sequence[int], token_ids: Sequence[list[int]]) -> None:
        """Learn what the last stage sampled in a step."""

    def close(self) -> None:
        """Give all memory back."""


@dataclass(slots=True)
class _PendingStep:
    """A step on its way."""

    output: SchedulerOutput
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    own_error: Exception | None = None
    """What it raised on rank 0."""
    own_result: ModelRunnerOutput | None = None
    """What rank 0 gave: what became of media and of its parts of blocks."""
    is_done_here: threading.Event = field(default_factory=threading.Event)
    """Rank 0 has computed its stage."""


class PipelineExecutor(RankExecutor):
    """Runs each step on all stages, one behind the other (an `Executor`). One thread calls it.

    Args:
        runner: Rank 0's; closed with this.
        ranks: The others, ready, by their numbers.
        groups: Rank 0's ends of its groups; closed with this.
        mesh: The layout, as rank 0 sees it.
    """

    def __init__(
        self, runner: RunsStage, ranks: Sequence[RankHandle], groups: Sequence[Collectives], mesh: Mesh
    ) -> None:
        super().__init__(ranks)
        self._runner, self._groups, self._mesh = runner, groups, mesh
        self._leader = mesh.tp * (mesh.pp - 1)
        """Rank that says what a step gave: the first one of the last stage."""
        self._lock = threading.Lock()
        self._pending: dict[int, _PendingStep] = {}
        self._failed: set[int] = set()
        """Steps that failed on all ranks that had to."""
        self._sampled: list[tuple[int, list[int], list[list[int]]]] = []
        """Step, rows and tokens that the stages before the last do not know yet."""
        self._end: RankDeadError | None = None
        self._has_failed_step = False
        """A step has said that a rank is gone."""
        self._is_computing = False
        """Rank 0 computes its stage of a step."""
        for rank in ranks:
            rank.on_result = self._on_result
        self._watch()

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start one step: rank 0's stage is computed when this returns. The future has RankDeadError where a rank is
        gone: the engine cannot go on."""
        step = _PendingStep(output)
        try:
            self._check()
            self._tell_sampled()
            self.before_step(output)
            with self._lock:
                self._pending[output.step_id] = step
            for rank in self._ranks:
                rank.check()
                rank.send(("result" if rank.rank == self._leader else "step", output))
            self._is_computing = True
            step.own_result = self._runner.run(output)
        except RankDeadError as error:
            self._die(error)
        except Exception as error:  # the stages behind fail, too, and the last one says so
            step.own_error = error
        self._is_computing = False
        step.is_done_here.set()
        if self._end is not None:
            self._has_failed_step = True
            _fail(step.future, self._end)
        return step.future

    def close(self) -> None:
        """End the other ranks and give all memory back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._end is not None:  # ranks may wait for each other
            self._abort(self._end.cause)
        for rank in self._ranks:
            rank.close()
        with self._lock:
            steps, self._pending = list(self._pending.values()), {}
        for step in steps:
            _fail(step.future, RankDeadError(0, "it was closed while the step was on its way"))
        for group in self._groups:
            group.close()
        self._runner.close()

    def _check(self) -> None:
        if self._end is not None:
            raise self._end

    def _tell_sampled(self) -> None:
        """Let the stages before the last know the tokens of the steps that have ended."""
        with self._lock:
            ended, self._sampled = self._sampled, []
        for step_id, rows, token_ids in ended:
            self._runner.take_sampled(step_id, rows, token_ids)
            for rank in self._ranks:
                if rank.rank < self._leader:
                    rank.send(("call", "take_sampled", (step_id, rows, token_ids)))

    def _on_result(self, result: ModelRunnerOutput) -> None:
        with self._lock:
            step = self._pending.pop(result.step_id, None)
            if step is None:
                return
            self._sampled.append((result.step_id, step.output.rows, result.sampled_token_ids))
        if self.merge_transfers is not None or step.output.encode:
            step.is_done_here.wait()
        own = step.own_result
        if own is not None and step.output.encode:  # the towers are those of the first stage
            result.failed_media, result.encoded_media = own.failed_media, own.encoded_media
            result.encode_seconds = own.encode_seconds
        if self.merge_transfers is not None:
            reports = [
                result.kv_transfer if rank.rank == self._leader else rank.transfers_of(step.output)
                for rank in self._ranks
            ]
            result.kv_transfer = self.merge_transfers(step.output, [None if own is None else own.kv_transfer, *reports])
        with contextlib.suppress(InvalidStateError):  # a rank was found dead meanwhile
            step.future.set_result(result)

    def _on_failure(self, failure: RankDeadError, step_id: int | None) -> None:
        """A rank is gone, or a step raised there."""
        if self._is_closed:
            return
        if step_id is None:
            self._die(failure)
            self._later(IDLE_S, lambda: None if self._has_failed_step else self.on_idle_failure(failure))
            self._later(STUCK_S, lambda: self.on_idle_failure(failure) if self._is_computing else None)
        elif failure.rank == self._leader:
            self._step_failed(step_id, failure)
        else:
            self._later(AGREE_S, partial(self._expect_failure, step_id, failure))

    def _step_failed(self, step_id: int, failure: RankDeadError) -> None:
        """The last stage says that a step failed: take it for that, if the ranks of each stage agree."""
        with self._lock:
            step = self._pending.get(step_id)
        if step is None:
            return
        try:
            why = self._agreed_error(step_id, step)
        except RankDeadError as error:
            self._die(error)
            return
        with self._lock:
            self._failed = {each for each in self._failed if each > step_id - 8} | {step_id}
            self._pending.pop(step_id, None)
        _fail(step.future, RuntimeError(why))

    def _agreed_error(self, step_id: int, step: _PendingStep) -> str:
        """What a step raised first. Raises RankDeadError where ranks of one stage do not agree."""
        if not step.is_done_here.wait(AGREE_S):
            raise RankDeadError(0, f"it went on with step {step_id}, which failed on the last stage")
        errors = [None if step.own_error is None else f"{type(step.own_error).__name__}: {step.own_error}"]
        errors += [rank.error_of(step_id) for rank in self._ranks]
        for first in range(0, self._mesh.tp * self._mesh.pp, self._mesh.tp):
            stage = errors[first : first + self._mesh.tp]
            if None in stage and any(error is not None for error in stage):
                rank = first + stage.index(None)
                why = next(error for error in stage if error is not None)
                raise RankDeadError(rank, f"it went on with step {step_id}, which failed beside it: {why}")
        return next(error for error in errors if error is not None)

    def _expect_failure(self, step_id: int, failure: RankDeadError) -> None:
        """A step raised on another rank than the last stage's first: that one has failed meanwhile, too, or the ranks
        have gone apart."""
        with self._lock:
            is_known = step_id in self._failed
        if not is_known:
            self._die(failure)

    def _die(self, failure: RankDeadError) -> None:
        """A rank is gone: no step can end any more."""
        failure = self._cause(failure)
        with self._lock:
            self._end = self._end or failure
            steps, self._pending = list(self._pending.values()), {}
        self._abort(failure.cause)
        for step in steps:
            self._has_failed_step = True
            _fail(step.future, self._end)

    def _abort(self, cause: str) -> None:
        for group in self._groups:
            group.abort(cause)


def _fail(future: Future[ModelRunnerOutput], error: Exception) -> None:
    """Let a step have failed, if it has not ended."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
