"""Serves a `BlockStore` over unix sockets and TCP, one thread per connection, as many as are allowed."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

from quire_interfaces import ConfigError
from quire_kv_transfer.block_store import BlockStore, TenantBlocks
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
    WIRE_KEY,
    parse_address,
    receive,
    receive_into,
    send,
    unpack_key,
)

__all__ = ["BlockStoreServer"]

_logger = logging.getLogger(__name__)

MESSAGE_S = 30.0
"""A message that was begun must be whole within this time."""
MAX_KEY_BYTES = 4096
BACKLOG = 64


class BlockStoreServer:
    """Listens from the beginning, serves from `start` on.

    Args:
        store: The blocks; closed with the server.
        addresses: "unix:/path" or "tcp://host:port" (port 0: a free one).
        max_frame_bytes: Largest frame taken.
        max_connections: Connections at a time; further ones are closed at once.

    Raises:
        ConfigError: an address cannot be used; or is reachable from other machines, and the store has no keys.
    """

    def __init__(
        self,
        store: BlockStore,
        addresses: Sequence[str],
        *,
        max_frame_bytes: int = 256 << 20,
        max_connections: int = 256,
    ) -> None:
        self._store = store
        self._max_frame_bytes = max_frame_bytes
        self._slots = threading.Semaphore(max_connections)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._listeners: list[socket.socket] = []
        try:
            for address in addresses:
                self._listeners.append(_listen(address, has_keys=store.has_keys))
        except ConfigError:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        """Where it listens, with the ports that were chosen."""
        return [_address_of(listener) for listener in self._listeners]

    def start(self) -> None:
        """Begin to serve, in threads of its own."""
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="quire-kv-store", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no file descriptors: some connection will end
                continue
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            with self._lock:
                self._connections.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="quire-kv-store-client", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), sock:
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                blocks, fingerprint = self._greet(sock)
                if blocks is not None:
                    while True:
                        self._answer(sock, blocks, fingerprint)
        finally:
            with self._lock:
                self._connections.discard(sock)
            self._slots.release()

    def _greet(self, sock: socket.socket) -> tuple[TenantBlocks | None, bytes]:
        deadline_s = time.monotonic() + MESSAGE_S
        magic, version, key_bytes, fingerprint = GREETING.unpack(receive(sock, GREETING.size, deadline_s))
        if magic != MAGIC or key_bytes > MAX_KEY_BYTES:
            return None, b""
        blocks = self._store.tenant_of(receive(sock, key_bytes, deadline_s))
        is_welcome = blocks is not None and version == VERSION
        send(sock, [bytes([is_welcome])], deadline_s)
        return (blocks if is_welcome else None), fingerprint

    def _answer(self, sock: socket.socket, blocks: TenantBlocks, fingerprint: bytes) -> None:
        """Wait for one request, however long, and answer it. Raises OSError when the connection is to end."""
        sock.settimeout(None)
        first = receive(sock, 1)
        deadline_s = time.monotonic() + MESSAGE_S
        operation, count = REQUEST.unpack(first + receive(sock, REQUEST.size - 1, deadline_s))
        if not 0 < count <= (MAX_KEYS if operation == LOOK_UP else 1):
            raise ConnectionError("a request with too many keys, or none")
        data = memoryview(receive(sock, count * WIRE_KEY.size, deadline_s))
        keys = [unpack_key(data[start : start + WIRE_KEY.size]) for start in range(0, len(data), WIRE_KEY.size)]
        if operation == LOOK_UP:
            send(sock, [blocks.look_up(fingerprint, keys)], deadline_s)
        elif operation == LOAD:
            frame = blocks.load(fingerprint, keys[0])
            send(sock, [LENGTH.pack(len(frame or b"")), frame or b""], deadline_s)
        elif operation == STORE:
            (length,) = LENGTH.unpack(receive(sock, LENGTH.size, deadline_s))
            if not 0 < length <= self._max_frame_bytes:
                raise ConnectionError("a frame that is too large, or empty")
            frame = bytearray(length)
            receive_into(sock, [memoryview(frame)], deadline_s)
            send(sock, [bytes([blocks.store(fingerprint, keys[0], frame)])], deadline_s)
        elif operation == DISCARD:
            blocks.discard(fingerprint, keys[0])
            send(sock, [b"\1"], deadline_s)
        else:
            raise ConnectionError("an unknown request")

    def close(self) -> None:
        """End all connections, and write what waits for the disk. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            if listener.family == socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    os.unlink(listener.getsockname())
            listener.close()
        with self._lock:
            connections = list(self._connections)
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._store.close()


def _listen(text: str, *, has_keys: bool) -> socket.socket:
    family, address = parse_address(text)
    if family != socket.AF_UNIX and not has_keys and not _is_loopback(str(address[0])):
        raise ConfigError(
            f"{text} can be reached from other machines, and the store asks nobody for a key; name tenants with keys, "
            "or listen on 127.0.0.1 or a unix socket",
            field="listen",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            _remove_stale(str(address))
            mask = os.umask(0o077)
            try:
                listener.bind(address)
            finally:
                os.umask(mask)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {text}: {error.strerror or error}", field="listen") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a store that is gone; one that answers is left, and binding fails."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"tcp://{host}:{name[1]}"
