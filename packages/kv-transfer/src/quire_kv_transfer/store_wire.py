"""How engines and a block store speak: a greeting, then requests and answers in turn, over a stream socket.

    greeting   magic, version (u32), length of the key (u32), fingerprint (32 bytes), key       -> status (u8)
    LOOK_UP    op (u8), number of keys (u32), keys                                              -> one byte per key
    LOAD       op, 1, key                                                                       -> length (u64), frame
    STORE      op, 1, key, length (u64), frame                                                  -> status (u8)
    DISCARD    op, 1, key                                                                       -> status (u8)

Integers are little endian. A key is its group (u32), the length of its hash (u32) and the hash, padded to 32 bytes.
Frames are those of `block_frame`. Every wait has a deadline; a message that breaks the rules ends the connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from quire_interfaces import BlockKey, ConfigError
from quire_kv_transfer.block_frame import MAX_HASH_BYTES

__all__ = [
    "DISCARD",
    "GREETING",
    "LENGTH",
    "LOAD",
    "LOOK_UP",
    "MAGIC",
    "MAX_KEYS",
    "REQUEST",
    "STORE",
    "VERSION",
    "WIRE_KEY",
    "pack_key",
    "parse_address",
    "receive",
    "receive_into",
    "send",
    "unpack_key",
]

MAGIC = b"QUIREKVS"
VERSION = 1
LOOK_UP, LOAD, STORE, DISCARD = range(1, 5)
GREETING = struct.Struct("<8sII32s")
REQUEST = struct.Struct("<BI")
LENGTH = struct.Struct("<Q")
WIRE_KEY = struct.Struct("<II32s")
MAX_KEYS = 1 << 16
"""Most keys of one request."""
_MAX_BUFFERS = 1024
"""Buffers that one system call takes (IOV_MAX on Linux)."""


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Family and address of `unix:/path` or `tcp://host:port`.

    Raises:
        ConfigError: neither of these.
    """
    if address.startswith("unix:") and len(address) > len("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:").removeprefix("//")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if address.startswith("tcp://") and host and port.isdecimal() and int(port) < 1 << 16:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        return family, (host.strip("[]"), int(port))
    raise ConfigError(f"{address!r} is no address of a block store; use unix:/path or tcp://host:port", field="kv_tier")


def pack_key(key: BlockKey) -> bytes:
    """A key as bytes."""
    return WIRE_KEY.pack(key.group, len(key.block_hash), key.block_hash)


def unpack_key(data: bytes | memoryview) -> BlockKey:
    """A key from its bytes. Raises ConnectionError when they are none."""
    group, length, padded_hash = WIRE_KEY.unpack(data)
    if not 0 < length <= MAX_HASH_BYTES:
        raise ConnectionError(f"a block hash has 1 to {MAX_HASH_BYTES} bytes, not {length}")
    return BlockKey(group, padded_hash[:length])


def receive_into(sock: socket.socket, buffers: Sequence[memoryview], deadline_s: float | None = None) -> None:
    """Fill the buffers.

    Raises:
        ConnectionError: the other side has gone.
        TimeoutError: it was not all there at `deadline_s` (of `time.monotonic`).
    """
    for buffer in buffers:
        view = buffer
        while len(view):
            _wait(sock, deadline_s)
            count = sock.recv_into(view)
            if count == 0:
                raise ConnectionError("the other side closed the connection")
            view = view[count:]


def receive(sock: socket.socket, num_bytes: int, deadline_s: float | None = None) -> bytes:
    """So many bytes. Raises as `receive_into`."""
    data = bytearray(num_bytes)
    receive_into(sock, [memoryview(data)], deadline_s)
    return bytes(data)


def send(
    sock: socket.socket, buffers: Sequence[bytes | bytearray | memoryview], deadline_s: float | None = None
) -> None:
    """Send all of the buffers. Raises as `receive_into`."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while views:
        _wait(sock, deadline_s)
        count = sock.sendmsg(views[:_MAX_BUFFERS])
        index = 0
        while index < len(views) and count >= len(views[index]):
            count -= len(views[index])
            index += 1
        views = views[index:]
        if count:
            views[0] = views[0][count:]


def _wait(sock: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other side is too slow")
        sock.settimeout(left_s)
