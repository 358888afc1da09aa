"""Messages between ranks of several hosts: a `Channel` over TCP whose ends prove that they know the same secret.

Each end proves it to the other before anything is unpickled, and each message is signed (HMAC-SHA256) with a key of its
connection and direction and with its number, so that none can be forged, repeated or left out. Messages are not
encrypted. Without a secret every host that reaches the port may take part: for networks that are trusted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pickle
import socket
from typing import Any, NamedTuple

from quire_distributed.messages import Channel
from quire_interfaces import ConfigError

__all__ = ["ChannelKeys", "SignedChannel", "WrongSecretError", "accept_channel", "connect_channel"]

_MAGIC = b"quire ranks 1\n"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAX_PURPOSE_BYTES = 1 << 16
_HANDSHAKE_S = 5.0
"""How long the other end may take for a step of the handshake."""


class WrongSecretError(ConfigError):
    """The other end of a connection knows another secret."""


class ChannelKeys(NamedTuple):
    """Keys of one end of a connection."""

    sends: bytes
    receives: bytes


class SignedChannel(Channel):
    """One end of a connection whose messages are signed. One thread sends, one receives.

    Args:
        end: The connection, its handshake done.
        keys: Of this end.
    """

    def __init__(self, end: socket.socket, keys: ChannelKeys) -> None:
        super().__init__(end)
        self.keys = keys
        self._num_sent = self._num_received = 0

    def fileno(self) -> int:
        """File descriptor of the connection, for a process that goes on with it (`ChannelKeys` beside it)."""
        return self._end.fileno()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        mac = _mac(self.keys.sends, self._num_sent.to_bytes(8, "little"), data)
        self._num_sent += 1
        self._end.sendall(len(data).to_bytes(8, "little") + mac + data)

    def receive(self) -> Any:
        """The next object.

        Raises:
            EOFError: The other end is gone, or something came that it did not send.
        """
        header = self._read(8 + _MAC_BYTES)
        data = self._read(int.from_bytes(header[:8], "little"))
        if not hmac.compare_digest(
            header[8:], _mac(self.keys.receives, self._num_received.to_bytes(8, "little"), data)
        ):
            self.close()
            raise EOFError("a message came that the other end did not sign")
        self._num_received += 1
        return pickle.loads(data)

    def let_go(self) -> None:
        """Close this process's descriptor; a process that inherited it goes on with the connection."""
        self._end.close()


def connect_channel(
    address: tuple[str, int], purpose: dict[str, Any], secret: bytes, *, silence_s: float
) -> SignedChannel:
    """Connect to `accept_channel`.

    Args:
        address: Host and port.
        purpose: What the connection is for, as JSON has it.
        secret: What both ends know.
        silence_s: How long the other host may not answer before the connection counts as broken.

    Raises:
        OSError: Nobody listens there, or what listens is no Quire.
        WrongSecretError: The other end knows another secret.
    """
    end = socket.create_connection(address, timeout=_HANDSHAKE_S)
    try:
        own, told = os.urandom(_NONCE_BYTES), json.dumps(purpose).encode()
        end.sendall(_MAGIC + own + len(told).to_bytes(4, "little") + told)
        theirs = _read(end, _NONCE_BYTES)
        transcript = own + theirs + told
        if not hmac.compare_digest(_read(end, _MAC_BYTES), _mac(secret, b"accepts", transcript)):
            raise WrongSecretError(
                f"{address[0]}:{address[1]} does not know this host's secret: set the same one on all hosts",
                field="master_addr",
            )
        end.sendall(_mac(secret, b"connects", transcript))
        _set_up(end, silence_s)
    except BaseException:
        end.close()
        raise
    return SignedChannel(
        end, ChannelKeys(_mac(secret, b"from connected", transcript), _mac(secret, b"from accepted", transcript))
    )


def accept_channel(end: socket.socket, secret: bytes, *, silence_s: float) -> tuple[SignedChannel, dict[str, Any]]:
    """The channel of a connection that was accepted, and what it is for. Closes it where it raises.

    Raises:
        OSError: The other end is gone, is too slow, or is no Quire.
        WrongSecretError: It knows another secret.
    """
    try:
        end.settimeout(_HANDSHAKE_S)
        if _read(end, len(_MAGIC)) != _MAGIC:
            raise OSError("the other end is no rank of Quire")
        theirs = _read(end, _NONCE_BYTES)
        length = int.from_bytes(_read(end, 4), "little")
        if length > _MAX_PURPOSE_BYTES:
            raise OSError("the other end is no rank of Quire")
        told, own = _read(end, length), os.urandom(_NONCE_BYTES)
        transcript = theirs + own + told
        end.sendall(own + _mac(secret, b"accepts", transcript))
        if not hmac.compare_digest(_read(end, _MAC_BYTES), _mac(secret, b"connects", transcript)):
            raise WrongSecretError("a host that connected knows another secret: set the same one on all hosts")
        purpose: dict[str, Any] = json.loads(told)
        _set_up(end, silence_s)
    except BaseException as error:
        end.close()
        if isinstance(error, ValueError) and not isinstance(error, ConfigError):
            raise OSError("the other end is no rank of Quire") from error
        raise
    return SignedChannel(
        end, ChannelKeys(_mac(secret, b"from accepted", transcript), _mac(secret, b"from connected", transcript))
    ), purpose


def _mac(key: bytes, label: bytes, data: bytes | bytearray) -> bytes:
    mac = hmac.new(key, label, "sha256")
    mac.update(data)
    return mac.digest()


def _read(end: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = end.recv(length - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data


def _set_up(end: socket.socket, silence_s: float) -> None:
    """No delays, no bound on waiting, and an end when the other host falls silent."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, round(silence_s / 4))
    for name, value in (
        ("TCP_KEEPIDLE", interval_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(silence_s * 1000)),
    ):
        with contextlib.suppress(AttributeError):  # not there on every platform
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
