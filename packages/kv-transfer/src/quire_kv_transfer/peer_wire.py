"""How engines speak of blocks that one holds for another: JSON messages over a TCP connection, each with a deadline.

    open      who asks, for which blocks of which request  -> where they are, and how to read them
    read      numbers of opened blocks                     -> their bytes (where the transport is the socket)
    close     the blocks were read                         -> whether they were held until now; checksums
    release   nobody will read them

Strings of bytes are hexadecimal. Each message is its length (u32, little endian) and so many bytes of JSON.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from quire_kv_transfer.store_wire import receive, send

__all__ = ["PEER_VERSION", "PeerError", "connect", "receive_message", "send_message"]

PEER_VERSION = 1
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 << 20


class PeerError(ConnectionError):
    """The other engine refuses, or says something that makes no sense."""


def connect(host: str, port: int, networks: Sequence[str], deadline_s: float) -> socket.socket:
    """A connection to another engine.

    Args:
        host: Name or address.
        port: Port.
        networks: Networks that it may be in; where empty, private ones and this machine.
        deadline_s: Of `time.monotonic`.

    Raises:
        PeerError: the address is not one that engines may be at.
        OSError: nobody answers there in time.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if networks:
        is_allowed = any(ip in ipaddress.ip_network(network, strict=False) for network in networks)
    else:
        is_allowed = ip.is_private or ip.is_loopback
    if not is_allowed:
        raise PeerError(
            f"{host} is {ip}, where no engine is expected; add its network to kv_connector_extra_config.peers"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def send_message(sock: socket.socket, message: dict[str, Any], deadline_s: float) -> None:
    """Send one message. Raises OSError."""
    data = json.dumps(message, separators=(",", ":")).encode()
    send(sock, [LENGTH.pack(len(data)), data], deadline_s)


def receive_message(sock: socket.socket, deadline_s: float) -> dict[str, Any]:
    """The next message.

    Raises:
        PeerError: it is no message, or says that the other side refuses.
        OSError: it does not come in time.
    """
    (length,) = LENGTH.unpack(receive(sock, LENGTH.size, deadline_s))
    if length > MAX_MESSAGE_BYTES:
        raise PeerError(f"a message of {length} bytes is longer than any")
    try:
        message = json.loads(receive(sock, length, deadline_s))
    except ValueError as error:
        raise PeerError(f"a message is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise PeerError("a message is no JSON object")
    if message.get("error"):
        raise PeerError(str(message["error"]))
    return message
