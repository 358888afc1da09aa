"""`RunnerExecutor`: steps in order, in the caller or in one worker thread.

With a thread, the next step can be planned on the host while this one computes (torch lets go of the interpreter lock
inside its operators). Knows nothing of what a step is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from quire_interfaces.errors import EngineDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_runner.runner import ModelRunner

__all__ = ["RunnerExecutor"]


class RunnerExecutor:
    """Runs the steps of one `ModelRunner` (an `Executor`). One thread calls it.

    Args:
        runner: Owned from now on: `close` closes it.
        threaded: False runs each step inside `execute` and returns a finished future (depth 0, debugging); True runs
            steps in one worker thread (needed for asynchronous depth 1).
        max_in_flight: Steps that may wait or run at once; a caller that exceeds it has a bug.
        close_timeout_s: How long `close` waits for running steps, in seconds.
    """

    def __init__(
        self, runner: ModelRunner, *, threaded: bool = False, max_in_flight: int = 8, close_timeout_s: float = 60.0
    ) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-runner") if threaded else None
        self._max_in_flight = max_in_flight
        self._close_timeout_s = close_timeout_s
        self._in_flight: list[Future[ModelRunnerOutput]] = []
        self._closed = False

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step; see `Executor.execute`.

        Raises:
            EngineDeadError: the executor was closed, or `max_in_flight` steps are under way.
        """
        if self._closed:
            raise EngineDeadError(f"step {output.step_id} came after the executor was closed; make a new engine")
        if self._worker is None:
            return _run_now(self._runner.execute, output)
        self._in_flight = [future for future in self._in_flight if not future.done()]
        if len(self._in_flight) >= self._max_in_flight:
            raise EngineDeadError(
                f"step {output.step_id} would be number {len(self._in_flight) + 1} in flight, the bound is "
                f"{self._max_in_flight}; take results before handing out more steps"
            )
        future = self._worker.submit(self._runner.execute, output)
        self._in_flight.append(future)
        return future

    def close(self) -> None:
        """Finish running steps and give all memory back. Idempotent.

        Raises:
            EngineDeadError: a step did not end within `close_timeout_s`; its memory stays held.
        """
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.shutdown(wait=False)
            if wait(self._in_flight, timeout=self._close_timeout_s).not_done:
                raise EngineDeadError(
                    f"a step still ran {self._close_timeout_s} s after close; end the process to free its memory"
                )
        self._runner.close()


def _run_now(
    step: Callable[[SchedulerOutput], ModelRunnerOutput], output: SchedulerOutput
) -> Future[ModelRunnerOutput]:
    future: Future[ModelRunnerOutput] = Future()
    try:
        future.set_result(step(output))
    except Exception as error:
        future.set_exception(error)
    return future
