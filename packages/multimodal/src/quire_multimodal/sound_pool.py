"""Recordings as streams of samples, decoded by processes of their own, which are kept for the next file."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_multimodal.errors import MediaError
from quire_multimodal.worker_messages import receive, send

__all__ = ["OpenSound", "SoundPool"]

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class _Worker:
    """One process; asked by one thread at a time."""

    def __init__(self) -> None:
        self.is_usable = True
        """Whether it may be asked again: it has answered what it was asked."""
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-m", "quire_multimodal.sound_worker", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, **_ENVIRONMENT}, stdin=subprocess.DEVNULL
            )

    def ask(self, message: dict[str, Any], timeout_s: float, file: int | None = None) -> tuple[dict[str, Any], bytes]:
        """Its answer.

        Raises:
            MediaError: what it read is wrong, or it died of it, or took too long.
        """
        self._connection.settimeout(timeout_s)
        self.is_usable = False
        try:
            send(self._connection, message)
            if file is not None:
                socket.send_fds(self._connection, [b"f"], [file])
            answer, data = receive(self._connection)
        except TimeoutError:
            raise MediaError(f"the sound was not decoded within {timeout_s:g} s") from None
        except (OSError, EOFError):
            raise MediaError("the sound cannot be decoded: its decoder broke down") from None
        self.is_usable = True
        if "error" in answer:
            raise MediaError(answer["error"], code=answer["code"])
        return answer, data

    def end(self) -> None:
        """End the process at once."""
        self._connection.close()
        self.process.kill()
        self.process.wait()


class OpenSound:
    """A recording that is being decoded. Not thread-safe; close it, whatever was read of it.

    Args:
        pool: Whose process decodes it.
        worker: The process.
        duration_s: Length, as its packets say.
        timeout_s: Longest time that a block may take.
    """

    def __init__(self, pool: SoundPool, worker: _Worker, duration_s: float, timeout_s: float) -> None:
        self.duration_s = duration_s
        self._pool, self._worker, self._timeout_s = pool, worker, timeout_s
        self._is_over = self._is_closed = False

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Blocks, float32 [samples]; waits. Raises MediaError."""
        while (block := self._next()) is not None:
            yield block

    async def __aiter__(self) -> AsyncGenerator[NDArray[np.float32], None]:
        """The same without keeping the event loop from its work."""
        while (block := await asyncio.to_thread(self._next)) is not None:
            yield block

    def _next(self) -> NDArray[np.float32] | None:
        if self._is_over or self._is_closed:
            return None
        answer, data = self._worker.ask({"do": "next"}, self._timeout_s)
        self._is_over = answer["is_last"]
        return None if self._is_over else np.frombuffer(data, np.float32)

    def close(self) -> None:
        """Give the process back. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.give_back(self._worker)


class SoundPool:
    """Processes that decode recordings. Thread-safe; they start when there is work for them.

    Args:
        max_idle: Most processes that are kept for the next file.
    """

    def __init__(self, max_idle: int = 1) -> None:
        self._max_idle, self._is_closed = max_idle, False
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()

    def open(
        self, file: int, *, max_seconds: float, rate: int = 16_000, block_s: float = 5.0, timeout_s: float = 120.0
    ) -> OpenSound:
        """Begin with a file; waits.

        Args:
            file: Descriptor of a seekable file; it may be closed as soon as this returns.
            max_seconds: Longest sound.
            rate: Samples in a second that blocks are to have.
            block_s: About how long a block is.
            timeout_s: Longest time that one answer may take.

        Raises:
            MediaError: no sound, too long a one, or a damaged file.
        """
        worker = self._take()
        message = {"do": "open", "max_seconds": max_seconds, "rate": rate, "block_s": block_s}
        try:
            answer, _ = worker.ask(message, timeout_s, file)
        except BaseException:
            self.give_back(worker)
            raise
        return OpenSound(self, worker, answer["duration_s"], timeout_s)

    def _take(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise MediaError("the server is shutting down", code="unsupported_media")
            if self._idle:
                return self._idle.pop()
        worker = _Worker()
        with self._lock:
            self._all.add(worker)
        return worker

    def give_back(self, worker: _Worker) -> None:
        """A file is done with, to its end or not. `OpenSound.close` calls it."""
        with self._lock:
            if worker.is_usable and not self._is_closed and len(self._idle) < self._max_idle:
                self._idle.append(worker)
                return
            self._all.discard(worker)
        worker.end()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed, workers, self._all, self._idle = True, list(self._all), set(), []
        for worker in workers:
            worker.end()
