"""`ThreadedExecutor`: the steps of a runner in order, in worker threads.

The next step can be planned on the host while this one computes (torch lets go of the interpreter lock inside its
operators). Without threads, the runner itself is the executor. Knows nothing of what a step is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from quire_interfaces.errors import EngineDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_runner.protocols import RunsSteps

__all__ = ["ThreadedExecutor"]

IDLE_S = 0.05
"""Time without a step after which nobody is taken to wait for one."""


class ThreadedExecutor:
    """Runs the steps of one runner in a worker thread (an `Executor`). One thread calls it.

    On a device that computes beside the host, a second thread waits for results: the next step is launched while the
    device still computes, and the device never waits for the host. While no step comes, the first thread does what the
    runner has deferred (`use_slack`), piece by piece, from `prepare` on.

    Args:
        runner: Owned from now on: `close` closes it.
        reads_apart: Read results in another thread.
        max_in_flight: Steps that may wait or run at once; a caller that exceeds it has a bug.
        close_timeout_s: How long `close` waits for running steps, in seconds.
    """

    def __init__(
        self,
        runner: RunsSteps,
        *,
        reads_apart: bool = False,
        max_in_flight: int = 8,
        close_timeout_s: float = 60.0,
    ) -> None:
        self._runner = runner
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="quire-runner")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="quire-results") if reads_apart else None
        self._max_in_flight = max_in_flight
        self._close_timeout_s = close_timeout_s
        self._in_flight: list[Future[ModelRunnerOutput]] = []
        self._num_launched = self._num_submitted = 0
        self._submitted = threading.Condition()
        self._closed = False

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step in the worker thread.

        Raises:
            EngineDeadError: the executor was closed, or `max_in_flight` steps are under way.
        """
        if self._closed:
            raise EngineDeadError(f"step {output.step_id} came after the executor was closed; make a new engine")
        self._in_flight = [future for future in self._in_flight if not future.done()]
        if len(self._in_flight) >= self._max_in_flight:
            raise EngineDeadError(
                f"step {output.step_id} would be number {len(self._in_flight) + 1} in flight, the bound is "
                f"{self._max_in_flight}; take results before handing out more steps"
            )
        if self._reader is None:
            future = self._worker.submit(self._runner.run, output)
        else:
            future = Future()
            with self._submitted:
                self._num_submitted += 1
                self._submitted.notify()
            self._worker.submit(self._launch, output, future, self._reader)
        self._in_flight.append(future)
        return future

    def prepare(self, function: Callable[[], None]) -> None:
        """Call `function` in the thread that runs steps, and wait for it. Before the first step."""
        self._worker.submit(function).result()
        if self._reader is not None:
            self._worker.submit(self._use_slack, None)

    def close(self) -> None:
        """Finish running steps and give all memory back. Idempotent.

        Raises:
            EngineDeadError: a step did not end within `close_timeout_s`; its memory stays held.
        """
        if self._closed:
            return
        with self._submitted:
            self._closed = True
            self._submitted.notify()
        self._worker.shutdown(wait=False)
        not_done = wait(self._in_flight, timeout=self._close_timeout_s).not_done
        if self._reader is not None:
            self._reader.shutdown(wait=False)
        if not_done:
            raise EngineDeadError(
                f"a step still ran {self._close_timeout_s} s after close; end the process to free its memory"
            )
        self._worker.shutdown()  # deferred work may still be running
        self._runner.close()

    def _launch(self, output: SchedulerOutput, future: Future[ModelRunnerOutput], reader: ThreadPoolExecutor) -> None:
        self._num_launched += 1
        if not future.set_running_or_notify_cancel():
            return
        try:
            read = self._runner.launch(output)
        except BaseException as error:
            future.set_exception(error)
            return
        reader.submit(_resolve, future, read)
        self._use_slack(future)

    def _use_slack(self, last: Future[ModelRunnerOutput] | None) -> None:
        """Do deferred work until there is none, or a step comes. `last`: the step before, which may still run."""

        def has_steps() -> bool:
            return self._closed or self._num_submitted != self._num_launched

        while self._num_submitted == self._num_launched and self._runner.has_deferred_work:
            is_idle = last is None or last.done()
            with self._submitted:
                if self._submitted.wait_for(has_steps, IDLE_S):
                    return
            if is_idle:
                self._runner.use_slack()


def _resolve(future: Future[ModelRunnerOutput], read: Callable[[], ModelRunnerOutput]) -> None:
    try:
        future.set_result(read())
    except BaseException as error:
        future.set_exception(error)
