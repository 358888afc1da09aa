"""Messages between the ranks of one engine: pickled objects over a socket pair of processes that one started."""

from __future__ import annotations

import contextlib
import pickle
import socket
from typing import Any

__all__ = ["Channel"]


class Channel:
    """One end of a socket pair. One thread sends, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Any) -> None:
        """Send an object.

        Raises:
            OSError: The other end is gone.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._end.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> Any:
        """The next object.

        Raises:
            EOFError: The other end is gone.
        """
        return pickle.loads(self._read(int.from_bytes(self._read(8), "little")))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                num = self._end.recv_into(view)
            except OSError:
                num = 0
            if not num:
                raise EOFError("the other end of the channel is gone")
            view = view[num:]
        return data

    def close(self) -> None:
        """Close this end; whoever receives at the other one, or here, gets EOFError."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
