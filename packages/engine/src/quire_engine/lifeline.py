"""What a process is told by its parent at the start, over a standard input that ends when the parent does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

__all__ = ["read_spec"]

Spec = TypeVar("Spec")


def read_spec(kind: type[Spec], on_end: Callable[[Spec], None]) -> Spec:
    """Read a message of msgpack behind its length (8 bytes, little-endian) from standard input, which is empty for
    everybody else from then on.

    Args:
        kind: What the message is decoded to.
        on_end: Called with the message, on a thread of its own, when the parent has gone away.

    Raises:
        SystemExit: the parent went away before.
    """
    lifeline = os.dup(0)  # not inherited by processes that are started here
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    length = int.from_bytes(_read_exactly(lifeline, 8), "little")
    spec = msgspec.msgpack.decode(_read_exactly(lifeline, length), type=kind)

    def watch() -> None:
        try:
            while os.read(lifeline, 4096):
                pass
        finally:
            on_end(spec)

    threading.Thread(target=watch, name="quire-lifeline", daemon=True).start()
    return spec


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = os.read(fd, length - len(data))
        if not piece:
            raise SystemExit("the parent process went away before it said what to start")
        data += piece
    return data
