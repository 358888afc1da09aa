"""A small pool of daemon threads, which tenants use in turn. Knows nothing of what it runs.

Unlike `concurrent.futures.ThreadPoolExecutor`, whose threads an interpreter waits for at its end, a compile that takes
very long never keeps a process from ending. It is waited for a little: a thread that comes back from a library in Rust
while the interpreter is being taken down crashes the process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from quire_structured_output.turns import TurnQueue

__all__ = ["WorkerPool"]

Result = TypeVar("Result")

LAST_WAIT_S = 10.0
"""How long the end of the process waits for what runs."""


class _Jobs:
    """What waits for a thread; shared by the threads, which the pool itself must not be kept alive by."""

    def __init__(self) -> None:
        self.queue: TurnQueue[tuple[Future[Any], Callable[[], Any]]] = TurnQueue()
        self.changed = threading.Condition()
        self.is_closed = False
        self.num_idle = 0

    def run(self) -> None:
        """The work of one thread."""
        while True:
            with self.changed:
                self.num_idle += 1
                while not len(self.queue):
                    if self.is_closed:
                        return
                    self.changed.wait()
                self.num_idle -= 1
                tenant, (future, work) = self.queue.take()
            if not future.set_running_or_notify_cancel():
                continue
            start_s = time.monotonic()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            with self.changed:
                self.queue.used(tenant, time.monotonic() - start_s)
            del future, work

    def stop(self) -> None:
        """Take no more work, and drop what waits."""
        with self.changed:
            self.is_closed = True
            dropped = [self.queue.take()[1][0] for _ in range(len(self.queue))]
            self.changed.notify_all()
        for future in dropped:
            future.cancel()


class WorkerPool:
    """Runs functions in up to `num_workers` threads that start when they are needed.

    Args:
        num_workers: At least 1.
        name: Of the threads.
    """

    def __init__(self, num_workers: int, name: str) -> None:
        self._num_workers = num_workers
        self._name = name
        self._jobs = _Jobs()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _finish, self._jobs, self._threads)

    def submit(self, work: Callable[[], Result], *, tenant: str | None = None, cost: float = 0.0) -> Future[Result]:
        """Run `work` when a thread is free and it is its turn (`turns`). Without work that waits, in order."""
        future: Future[Result] = Future()
        jobs = self._jobs
        with jobs.changed:
            jobs.queue.put((future, work), tenant=tenant, cost=cost)
            if jobs.num_idle < len(jobs.queue) and len(self._threads) < self._num_workers:
                thread = threading.Thread(target=jobs.run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            jobs.changed.notify()
        return future

    def close(self) -> None:
        """Take no more work; what runs now goes on in its thread, and its result is dropped."""
        self._jobs.stop()


def _finish(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    """At the end of the process."""
    jobs.stop()
    deadline = time.monotonic() + LAST_WAIT_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
