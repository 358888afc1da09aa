"""A process that decodes recordings: `python -m quire_multimodal.sound_worker FD`, asked over a socket by `sound_pool`.

One file at a time; each of its blocks is asked for, so that whoever reads slowly makes it wait. A file comes as an open
descriptor: this process needs no name and no right to read anything else.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_multimodal.errors import MediaError
from quire_multimodal.sound_files import SoundFile
from quire_multimodal.worker_messages import leave_signals_to_owner, receive, send

__all__: list[str] = []

_MAX_MEMORY_BYTES = 2 << 30
"""Of this process, whatever a file asks for."""


def main() -> None:
    """Serve the socket whose file descriptor is the first argument."""
    leave_signals_to_owner()
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, hard))
    blocks: Iterator[NDArray[np.float32]] = iter(())
    try:
        while True:
            message, _ = receive(connection)
            try:
                if message["do"] == "open":
                    answer, blocks = _opened(connection, message)
                    data = b""
                else:
                    block = next(blocks, None)
                    answer, data = {"is_last": block is None}, b"" if block is None else block.tobytes()
            except MediaError as error:
                answer, data = {"error": str(error), "code": error.code}, b""
            send(connection, answer, data)
    except (EOFError, OSError):
        return  # the owner is gone


def _opened(connection: socket.socket, message: dict[str, Any]) -> tuple[dict[str, Any], Iterator[NDArray[np.float32]]]:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    file = os.fdopen(descriptors[0], "rb")
    sound = SoundFile(file, max_seconds=message["max_seconds"], rate=message["rate"])
    return {"duration_s": sound.duration_s}, sound.blocks(message["block_s"])


if __name__ == "__main__":
    main()
