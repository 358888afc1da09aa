"""Preparing processes: started, asked, replaced when they die, ended when an item takes too long.

Each is asked by a thread of its own, one item after another. A process that dies takes one item with it: it is tried
once more in a new process, and fails when that one dies too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quire_interfaces import CheckpointError, EngineDeadError
from quire_multimodal.errors import MediaError
from quire_multimodal.frames import receive, send

__all__ = ["WorkerPool", "WorkerSettings"]

_START_TIMEOUT_S = 300.0
_ATTEMPTS = 2
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
"""Of the processes: each has one core, and what the library says about missing torch is meant."""
_ENDING = "media are not prepared any more: the server is ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a preparing process is started with."""

    folder: str
    """Of the checkpoint whose processor runs."""
    backend: str = "pil"
    """Of the image processor: "pil" or "torchvision"."""
    embed_token_ids: Mapping[str, list[int]] = field(default_factory=dict)
    """Tokens that take embeddings, by modality."""
    bounds: Mapping[str, Any] = field(default_factory=dict)
    """Of `MediaBounds`."""
    io_options: Mapping[str, Any] = field(default_factory=dict)
    """How media are decoded, by modality."""
    niceness: int = 10
    """How far it stands back behind other processes."""


class _Worker:
    """One process. Not thread-safe.

    Raises:
        CheckpointError: it cannot load the processor.
        EOFError: it died while starting.
    """

    def __init__(self, settings: WorkerSettings, uses_torch: bool) -> None:
        ours, theirs = socket.socketpair()
        self._connection = ours
        command = [sys.executable, "-m", "quire_multimodal.worker", str(theirs.fileno())]
        environment = {**os.environ, **_ENVIRONMENT}
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        fields = {name: getattr(settings, name) for name in WorkerSettings.__slots__}
        try:
            answer = self.ask({**fields, "uses_torch": uses_torch}, b"", _START_TIMEOUT_S)
        except BaseException:
            self.end()
            raise
        if "error" in answer:
            self.end()
            raise CheckpointError(answer["error"])
        self.placeholders: dict[str, str] = answer["placeholders"]
        self.unusable: dict[str, str] = answer["unusable"]

    def ask(self, message: dict[str, Any], data: bytes | memoryview, timeout_s: float) -> dict[str, Any]:
        """Its answer.

        Raises:
            EOFError: it died.
            TimeoutError: it has not answered in time.
        """
        self._connection.settimeout(timeout_s)
        try:
            send(self._connection, message, data)
            return receive(self._connection)[0]
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError("the process is gone") from error

    def end(self) -> None:
        """End the process at once."""
        self._connection.close()
        self.process.kill()
        self.process.wait()


class WorkerPool:
    """Preparing processes of one processor. Thread-safe.

    Args:
        settings: What each is started with.
        num_workers: How many; all but the first start when there is work for them.
        timeout_s: Longest time for one item, in seconds.

    Raises:
        CheckpointError: the processor cannot be loaded, with torch or without.
    """

    def __init__(self, settings: WorkerSettings, *, num_workers: int = 1, timeout_s: float = 120.0) -> None:
        self._settings, self._timeout_s = settings, timeout_s
        first = self._start_first()
        self.placeholders = first.placeholders
        """Token that stands for an item in a chat template's text, by modality: the modalities that can be prepared."""
        self.unusable = first.unusable
        """Modalities that the processor has and that cannot be prepared, with the reason."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: list[_Worker | None] = [first, *[None] * (num_workers - 1)]
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"media-{index}", daemon=True)
            for index in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def _start_first(self) -> _Worker:
        """A process without torch where the processor loads without, which starts faster and takes less memory."""
        self.uses_torch = self._settings.backend == "torchvision"
        try:
            return _Worker(self._settings, self.uses_torch)
        except (CheckpointError, EOFError) as error:
            if self.uses_torch:
                raise CheckpointError(f"the processor cannot be loaded: {error}") from error
        self.uses_torch = True
        try:
            return _Worker(self._settings, True)
        except EOFError as error:
            raise CheckpointError("a preparing process died while it loaded the processor") from error

    def submit(self, message: dict[str, Any], data: bytes | memoryview = b"") -> Future[dict[str, Any]]:
        """Have an item prepared.

        Returns:
            The answer of the process; as exception a `MediaError` where the item cannot be prepared.
        """
        job = _Job(message, data)
        if self._closed:
            job.future.set_exception(EngineDeadError(_ENDING))
        else:
            self._jobs.put(job)
        return job.future

    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        running = [worker.process for worker in self._workers if worker is not None]
        return [process.pid for process in running if process.poll() is None]

    def close(self) -> None:
        """End the processes; items that are not prepared fail."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            if worker is not None:
                worker.process.kill()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            if worker is not None:
                worker.end()
        self._workers = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.set_exception(EngineDeadError(_ENDING))

    def _serve(self, index: int) -> None:
        while not self._closed and (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                answer = self._ask(index, job)
            except Exception as error:
                job.future.set_exception(error)
                continue
            if "error" in answer:
                job.future.set_exception(MediaError(answer["error"], code=answer["code"]))
            else:
                job.future.set_result(answer)

    def _ask(self, index: int, job: _Job) -> dict[str, Any]:
        for _ in range(_ATTEMPTS):
            if self._closed:
                raise EngineDeadError(_ENDING)
            try:
                worker = self._workers[index] or _Worker(self._settings, self.uses_torch)
                self._workers[index] = worker
                return worker.ask(job.message, job.data, self._timeout_s)
            except TimeoutError:
                self._drop(index)
                raise MediaError(
                    f"it took more than {self._timeout_s:g} s to prepare", code="media_processing_failed"
                ) from None
            except EOFError:
                self._drop(index)
        raise MediaError("the process that prepared it died, twice", code="media_processing_failed")

    def _drop(self, index: int) -> None:
        worker, self._workers[index] = self._workers[index], None
        if worker is not None:
            worker.end()


@dataclass(slots=True)
class _Job:
    message: dict[str, Any]
    data: bytes | memoryview
    future: Future[dict[str, Any]] = field(default_factory=Future)
