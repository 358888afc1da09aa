"""A small pool of daemon threads. Knows nothing of what it runs.

Unlike `concurrent.futures.ThreadPoolExecutor`, whose threads an interpreter waits for at its end, a compile that takes
very long never keeps a process from ending. It is waited for a little: a thread that comes back from a library in Rust
while the interpreter is being taken down crashes the process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["WorkerPool"]

Result = TypeVar("Result")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

LAST_WAIT_S = 10.0
"""How long the end of the process waits for what runs."""


class WorkerPool:
    """Runs functions in order of their submission, in up to `num_workers` threads that start when they are needed.

    Args:
        num_workers: At least 1.
        name: Of the threads.
    """

    def __init__(self, num_workers: int, name: str) -> None:
        self._num_workers = num_workers
        self._name = name
        self._jobs: _Jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _finish, self._jobs, self._threads)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` as soon as a thread is free."""
        future: Future[Result] = Future()
        self._jobs.put((future, work))
        with self._lock:
            if len(self._threads) < self._num_workers and not self._jobs.empty():
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Take no more work; what runs now goes on in its thread, and its result is dropped."""
        _stop(self._jobs, self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del job, future, work


def _stop(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            job = jobs.get_nowait()
            if job is not None:
                job[0].cancel()
    for _ in threads:
        jobs.put(None)


def _finish(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    """At the end of the process."""
    _stop(jobs, threads)
    deadline = time.monotonic() + LAST_WAIT_S
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
