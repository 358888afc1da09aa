"""A tier on another machine, or in another process of this one: the client of a block store (`quire kv-serve`).

The store may be slow, away, or gone at any time: then its blocks are computed. Each question has a deadline, and after
one that failed the store is left alone for a while, so that not every request waits for it anew.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

from quire_interfaces import BlockKey
from quire_kv_transfer.block_frame import BlockFormatError
from quire_kv_transfer.store_wire import (
    DISCARD,
    GREETING,
    LENGTH,
    LOAD,
    LOOK_UP,
    MAGIC,
    MAX_KEYS,
    REQUEST,
    STORE,
    VERSION,
    pack_key,
    parse_address,
    receive,
    receive_into,
    send,
)

__all__ = ["RemoteTier"]

_logger = logging.getLogger(__name__)

LOOK_UP_S = 0.25
"""Deadline of a look-up and of connecting: the step loop waits for it."""
TRANSFER_S = 1.0
"""Deadline of a frame."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""How long a store that failed is left alone; doubled with every further failure."""
MAX_KNOWN_KEYS = 1 << 18


class RemoteTier:
    """Implements `BlockTier`.

    Args:
        address: "unix:/path" or "tcp://host:port".
        fingerprint: 32 bytes that tell this model's blocks from all others; the store keeps others apart.
        api_key: Of the tenant, where the store asks for one.

    Raises:
        ConfigError: the address is none. A store that is not there is no error.
    """

    def __init__(self, address: str, fingerprint: bytes, *, api_key: str = "") -> None:
        self._family, self._address = parse_address(address)
        self.name = f"block store at {address}"
        key = api_key.encode()
        self._greeting = GREETING.pack(MAGIC, VERSION, len(key), fingerprint) + key
        self._known: dict[BlockKey, None] = {}
        """Keys that the store has, as far as it said."""
        self._sockets = threading.local()
        """One connection per thread: look-ups do not wait for frames on their way."""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._silent_until_s = 0.0
        self._is_closed = False

    def has(self, key: BlockKey) -> bool:
        """Whether the store said so, or took it."""
        return key in self._known and not self._is_silent

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() < self._silent_until_s

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Ask for the keys that are not known, in order, at most `MAX_KEYS`."""
        unknown = [key for key in keys if key not in self._known][:MAX_KEYS]
        if not unknown:
            return
        deadline_s = time.monotonic() + LOOK_UP_S
        sock = self._connect(deadline_s)
        if sock is None:
            return
        try:
            send(sock, [REQUEST.pack(LOOK_UP, len(unknown)), *map(pack_key, unknown)], deadline_s)
            answers = receive(sock, len(unknown), deadline_s)
        except OSError as error:
            self._failed(error)
            return
        self._note([key for key, answer in zip(unknown, answers, strict=True) if answer])

    def expect(self, key: BlockKey) -> None:
        """Nothing: the store has no use for it."""

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Get a frame. Raises BlockFormatError when it has another length."""
        deadline_s = time.monotonic() + TRANSFER_S
        sock = self._connect(deadline_s)
        if sock is None:
            return False
        num_bytes = sum(map(len, buffers))
        try:
            send(sock, [REQUEST.pack(LOAD, 1), pack_key(key)], deadline_s)
            (length,) = LENGTH.unpack(receive(sock, LENGTH.size, deadline_s))
            if length == num_bytes:
                receive_into(sock, buffers, deadline_s)
                return True
        except OSError as error:
            self._failed(error)
            return False
        self._known.pop(key, None)
        if length:
            self._drop_connection()  # the frame is still to come on it
            raise BlockFormatError(f"it has {length} bytes and should have {num_bytes}")
        return False

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Send a frame; whether the store took it."""
        length = sum(map(len, buffers))
        arrived = self._ask(STORE, key, [LENGTH.pack(length), *buffers])
        if arrived:
            self._note([key])
        return arrived

    def discard(self, key: BlockKey) -> None:
        """Have the store drop a frame."""
        self._known.pop(key, None)
        self._ask(DISCARD, key, [])

    def _ask(self, operation: int, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        deadline_s = time.monotonic() + TRANSFER_S
        sock = self._connect(deadline_s)
        if sock is None:
            return False
        try:
            send(sock, [REQUEST.pack(operation, 1), pack_key(key), *buffers], deadline_s)
            return receive(sock, 1, deadline_s) == b"\1"
        except OSError as error:
            self._failed(error)
            return False

    def _note(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._known[key] = None
            while len(self._known) > MAX_KNOWN_KEYS:
                del self._known[next(iter(self._known))]

    def _connect(self, deadline_s: float) -> socket.socket | None:
        """The connection of this thread; None while the store is left alone."""
        if self._is_silent or self._is_closed:
            return None
        sock: socket.socket | None = getattr(self._sockets, "value", None)
        if sock is not None:
            return sock
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.settimeout(min(LOOK_UP_S, max(deadline_s - time.monotonic(), 0.001)))
            sock.connect(self._address)
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(sock, [self._greeting], deadline_s)
            if receive(sock, 1, deadline_s) != b"\1":
                raise ConnectionError("it refuses: another version, or no tenant has this key")
        except OSError as error:
            sock.close()
            self._failed(error)
            return None
        self._sockets.value = sock
        with self._lock:
            self._open.add(sock)
            if self._pause_s > FIRST_PAUSE_S:
                _logger.warning("the %s is back", self.name)
            self._pause_s = FIRST_PAUSE_S
        return sock

    def _failed(self, error: OSError) -> None:
        """Leave the store alone for a while."""
        self._drop_connection()
        with self._lock:
            if self._is_closed:
                return
            if not self._is_silent:
                if self._pause_s == FIRST_PAUSE_S:
                    _logger.warning("the %s does not answer (%s); its blocks are computed meanwhile", self.name, error)
                self._silent_until_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._known.clear()  # it may come back empty

    def _drop_connection(self) -> None:
        sock: socket.socket | None = getattr(self._sockets, "value", None)
        if sock is not None:
            self._sockets.value = None
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            sockets, self._open = self._open, set()
        for sock in sockets:
            sock.close()
