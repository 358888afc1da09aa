"""Preparing processes: started, asked, replaced when they die, ended when an item takes too long.

Each prepares one item at a time. A process that dies takes one item with it: it is tried once more in a new process,
and fails when that one dies too.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, EngineDeadError
from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError
from quire_multimodal.spans import PromptFrame
from quire_multimodal.worker_messages import receive, send

__all__ = ["WorkerPool"]

_START_TIMEOUT_S = 300.0
_ATTEMPTS = 2
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip
"""Of the processes: each has one core, torch is missing on purpose, and strangers write no warnings into our log."""


class _Worker:
    """One process; not thread-safe, but for `process.kill()`."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-m", "quire_multimodal.worker", str(theirs.fileno())]
        environment = {**os.environ, **_ENVIRONMENT}
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Have it load the processor; its answer says what can be prepared.

        Raises:
            CheckpointError: it cannot; the process has ended.
            EOFError: it died.
        """
        answer = self.ask(settings, b"", _START_TIMEOUT_S)
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer

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
        folder: Of the checkpoint.
        config: Bounds, and how many processes there are: all but the first start when there is work for them.
        embed_token_ids: Tokens that take embeddings, by modality, where config.json does not say them.

    Raises:
        CheckpointError: the processor cannot be loaded, with torch or without.
    """

    def __init__(
        self, folder: Path | str, config: MediaConfig, embed_token_ids: Mapping[str, list[int]] | None = None
    ) -> None:
        self._num_workers, self._timeout_s, self._closed = config.media_processes, config.media_timeout_s, False
        self.uses_torch = config.image_backend == "torchvision"
        self._settings = {
            "folder": str(folder), "config": dataclasses.asdict(config), "embed_token_ids": embed_token_ids or {}
        }  # fmt: skip
        self._workers: set[_Worker] = set()
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # those that run are taken first
        try:
            try:
                first, loaded = self._start()
            except CheckpointError:  # a process without torch starts faster and takes less memory, where it can do all
                if self.uses_torch:
                    raise
                self.uses_torch = True
                first, loaded = self._start()
        except EOFError as error:
            raise CheckpointError("a preparing process died while it loaded the processor") from error
        self.placeholders: dict[str, str] = loaded["placeholders"]
        """Token that stands for an item in a chat template's text, by modality: the modalities that can be prepared."""
        self.embeds_texts: dict[str, list[Any]] = loaded["embeds_texts"]
        """Fields of an `EmbedsText`, by modality."""
        self.frame = None if loaded["frame"] is None else PromptFrame(*loaded["frame"])
        """What is written into prompts with media, beside the texts of items."""
        self.unusable: dict[str, str] = loaded["unusable"]
        """Modalities that the processor has and that cannot be prepared, with the reason."""
        for worker in (*[None] * (self._num_workers - 1), first):
            self._idle.put(worker)

    def _start(self) -> tuple[_Worker, dict[str, Any]]:
        """A new process, and what it says of its processor."""
        worker = _Worker()
        self._workers.add(worker)
        try:
            return worker, worker.load({**self._settings, "uses_torch": self.uses_torch})
        except BaseException:
            self._end(worker)
            raise

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            self._workers.discard(worker)
            worker.end()

    def prepare(self, message: dict[str, Any], data: bytes | memoryview = b"") -> dict[str, Any]:
        """Have an item prepared by the next process that is free; blocks.

        Returns:
            The answer of the process.

        Raises:
            MediaError: the item cannot be prepared.
            EngineDeadError: the pool is closed.
        """
        worker = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                if self._closed:
                    raise EngineDeadError("media are not prepared any more: the server is ending")
                try:
                    worker = worker or self._start()[0]
                    answer = worker.ask(message, data, self._timeout_s)
                except (EOFError, TimeoutError) as error:
                    self._end(worker)
                    worker = None
                    if isinstance(error, EOFError):
                        continue
                    reason = f"it took more than {self._timeout_s:g} s to prepare"
                    raise MediaError(reason, code="media_processing_failed") from None
                if "error" in answer:
                    raise MediaError(answer["error"], code=answer["code"])
                return answer
            raise MediaError("the process that prepared it died, twice", code="media_processing_failed")
        finally:
            self._idle.put(worker)

    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        return [worker.process.pid for worker in tuple(self._workers) if worker.process.poll() is None]

    def close(self) -> None:
        """End the processes; items that are being prepared fail."""
        self._closed = True
        for worker in tuple(self._workers):
            worker.process.kill()
        for _ in range(self._num_workers):  # each comes back as soon as its process is gone
            self._end(self._idle.get())
        for _ in range(self._num_workers):
            self._idle.put(None)  # for who waits: it is told
