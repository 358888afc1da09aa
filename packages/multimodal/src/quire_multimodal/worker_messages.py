"""What a preparing process and its owner say to each other over a socket: a JSON object and bytes. No pickle."""

from __future__ import annotations

import json
import signal
import socket
import struct
from typing import Any

__all__ = ["leave_signals_to_owner", "receive", "send"]

_LENGTHS = struct.Struct("<IQ")


def send(connection: socket.socket, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
    """Send a message with the bytes that belong to it.

    Raises:
        OSError: the other side is gone, or takes nothing within the socket's timeout.
    """
    header = json.dumps(message).encode()
    connection.sendall(_LENGTHS.pack(len(header), len(data)) + header)
    if len(data):
        connection.sendall(data)


def leave_signals_to_owner() -> None:
    """Ignore Ctrl-C and SIGTERM, which reach all processes of a terminal or of a service: the owner may have requests
    to finish, and ends this process by closing its connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The next message, with its bytes.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: nothing came within the socket's timeout.
    """
    header_len, data_len = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    return json.loads(_exactly(connection, header_len)), bytes(_exactly(connection, data_len))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError("the other side has closed the connection")
        filled += count
    return data
