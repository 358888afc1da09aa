"""Reading the files of a checkpoint several at once: ahead of whoever uses their mapped tensors, or by a library.

A mapped file is read page by page, by whoever touches it, one request to the disk after another: disks and network
file systems that answer many requests at once are left waiting. Here threads read whole files into the system's page
cache, as far ahead as a bound allows; who comes later finds the pages there. Nothing is copied for keeps, and a file
that cannot be read is left to whoever uses it, whose error says more.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError

__all__ = ["SMALL_BYTES", "ReadAhead", "read_ahead", "streamed"]

NUM_THREADS = 4
PIECE_BYTES = 8 << 20
SMALL_BYTES = 256 << 20
"""Checkpoints that are smaller are not worth threads."""
AHEAD_BYTES = 4 << 30
"""Most bytes that are read and not used yet, so that a machine with little memory does not lose pages again."""


class MappedCheckpoint(Protocol):
    """Mapped files and their tensors; `CheckpointFiles` is one."""

    @property
    def files(self) -> Sequence[Path]:
        """In the order in which `tensors` uses them."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Name and mapped tensor of everything in the files."""


class _Piece(NamedTuple):
    """What one thread reads at once."""

    file: Path
    offset: int
    num_bytes: int


class ReadAhead:
    """Reads files in order from `with` on, until its end; threads take piece after piece, so that a large file is read
    by all of them.

    Args:
        files: In the order in which they are used.
        num_threads: Reading at once.
        ahead_bytes: Bound on what is read before it is used.
    """

    def __init__(
        self, files: Sequence[Path], *, num_threads: int = NUM_THREADS, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        sizes = [(file, file.stat().st_size) for file in files]
        self._pieces = [
            _Piece(file, at, min(PIECE_BYTES, size - at)) for file, size in sizes for at in range(0, size, PIECE_BYTES)
        ]
        self._ends_bytes = list(accumulate(piece.num_bytes for piece in self._pieces))
        """Of each piece, how many bytes of all files end with it."""
        self._next = 0
        self._used_bytes = 0
        self._ahead_bytes = max(ahead_bytes, PIECE_BYTES)
        self._ends = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"read-ahead-{i}", daemon=True)
            for i in range(min(num_threads, len(self._pieces)))
        ]

    def used(self, num_bytes: int) -> None:
        """So many bytes of the files, from the first on, have been used."""
        with self._changed:
            self._used_bytes = num_bytes
            # What was used before anybody read it need not be read.
            self._next = max(self._next, bisect_right(self._ends_bytes, num_bytes))
            self._changed.notify_all()

    def __enter__(self) -> ReadAhead:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _take(self) -> _Piece | None:
        """The next piece, once the bound allows it; None when there are no more."""
        with self._changed:
            while not self._ends and self._next < len(self._pieces):
                if self._ends_bytes[self._next] - self._used_bytes <= self._ahead_bytes:
                    self._next += 1
                    return self._pieces[self._next - 1]
                self._changed.wait()
        return None

    def _run(self) -> None:
        buffer = bytearray(PIECE_BYTES)
        while (piece := self._take()) is not None:
            try:
                descriptor = os.open(piece.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                try:
                    os.preadv(descriptor, [buffer], piece.offset)
                finally:
                    os.close(descriptor)
            except OSError:
                continue


def read_ahead(checkpoint: MappedCheckpoint) -> Generator[tuple[str, Tensor], None, None]:
    """The tensors of a checkpoint, whose files are read ahead of them; closing it ends the threads that read."""
    done = 0
    with ReadAhead(checkpoint.files) as ahead, closing(checkpoint.tensors()) as tensors:
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.nbytes
            ahead.used(done)


def streamed(files: Sequence[Path]) -> Generator[tuple[str, Tensor], None, None]:
    """The tensors of safetensors files in the order in which the library `runai-model-streamer` has read them, in
    memory of their own.

    Raises:
        ConfigError: The library is not installed.
        CheckpointError: It cannot read the files.
    """
    try:
        from runai_model_streamer import SafetensorsStreamer
    except ImportError:
        raise ConfigError(
            "load_format 'runai_streamer' reads files by the library runai-model-streamer, which is not installed; "
            "install it (pip install 'quire-models[runai]'), or leave the setting out",
            field="load_format",
        ) from None
    try:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(file) for file in files])
            for name, tensor in streamer.get_tensors():
                yield name, tensor.clone()  # its buffers are used again
    except (ValueError, RuntimeError, OSError) as error:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"cannot read {names}: {error}; download the files again") from error
