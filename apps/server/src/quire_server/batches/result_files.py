"""The results of a batch, appended line by line to two files, which are also the record of what is done.

A line counts as answered once its result stands in one of the files as a whole, with its end of line, and was synced.
After a crash the files are read again: half a line at the end is cut off, the rest is the answer to the question which
lines still have to run. So each line is answered exactly once, whatever is killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

__all__ = ["LineResult", "ResultFiles", "line_id", "result_line"]

_DIGITS = 8
_MAX_READ_BYTES = 1 << 30
"""Longest line of a result that is read back."""


class LineResult(NamedTuple):
    """The result of one line."""

    number: int
    """Of the line, from 1 on."""
    is_error: bool
    text: bytes
    """As `result_line` makes it."""


class _Result(msgspec.Struct):
    id: str


def line_id(batch_id: str, number: int) -> str:
    """The id of a line's request, which tells its number."""
    return f"batch_req_{batch_id.removeprefix('batch_')[:16]}{number:0{_DIGITS}x}"


def result_line(request_id: str, custom_id: str | None, **fields: Any) -> bytes:
    """A line of an output or error file.

    Args:
        request_id: See `line_id`.
        custom_id: The client's name for it.
        fields: `response`, `error`, and `line` where the client needs it.
    """
    return msgspec.json.encode({"id": request_id, "custom_id": custom_id, **fields}) + b"\n"


class ResultFiles:
    """The two files of one batch. Methods block.

    Args:
        output: Of answers.
        errors: Of what was refused or not run.

    Raises:
        OSError: they cannot be written.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self.done: set[int] = set()
        """Numbers of the lines that have a result."""
        self.num_completed = self.num_failed = 0
        self._lock = threading.Lock()
        """Whoever closes waits for whoever writes."""
        self._paths = (output, errors)
        self._descriptors = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in self._paths]
        self._sizes = [0, 0]
        try:
            for place in (0, 1):
                self._recover(place)
        except BaseException:
            self.close()
            raise

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of answers, and of errors."""
        return self._sizes[0], self._sizes[1]

    def append(self, results: Sequence[LineResult]) -> None:
        """Write results down. They are there, on the disk, when this returns.

        Raises:
            OSError: the disk is full or fails; nothing of it counts then.
        """
        with self._lock:
            for place in (0, 1):
                own = [result for result in results if result.is_error == bool(place)]
                if own:
                    self._write(place, own)

    def close(self) -> None:
        """Give the files back; they stay. Idempotent."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.pop())

    def remove_empty(self) -> None:
        """Remove those that hold nothing."""
        for path, size in zip(self._paths, self._sizes, strict=True):
            if not size:
                path.unlink(missing_ok=True)

    def _write(self, place: int, results: Sequence[LineResult]) -> None:
        descriptor, size = self._descriptors[place], self._sizes[place]
        rest = memoryview(b"".join(result.text for result in results))
        end = size + len(rest)
        while rest:
            rest = rest[os.pwrite(descriptor, rest, end - len(rest)) :]
        os.fsync(descriptor)
        self._sizes[place] = end
        self.done.update(result.number for result in results)
        if place:
            self.num_failed += len(results)
        else:
            self.num_completed += len(results)

    def _recover(self, place: int) -> None:
        """Read what is there, and cut off what is not whole."""
        decoder, size = msgspec.json.Decoder(_Result), 0
        with self._paths[place].open("rb") as file:
            while (text := file.readline(_MAX_READ_BYTES)).endswith(b"\n"):
                try:
                    number = int(decoder.decode(text).id[-_DIGITS:], 16)
                except (msgspec.DecodeError, ValueError):
                    break
                size += len(text)
                self.done.add(number)
                if place:
                    self.num_failed += 1
                else:
                    self.num_completed += 1
        os.ftruncate(self._descriptors[place], size)
        self._sizes[place] = size
