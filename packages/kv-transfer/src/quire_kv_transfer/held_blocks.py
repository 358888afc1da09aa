"""Blocks that an engine holds for others to read: which, for how long, and serving them. One thread per reader."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_digest

from quire_interfaces import BlockKey, BlockMemory, KVTransferJob
from quire_kv_transfer.peer_wire import PEER_VERSION, PeerError, receive_message, send_message
from quire_kv_transfer.store_wire import send

__all__ = ["BlockServer", "HeldBlocks", "block_digest"]

_logger = logging.getLogger(__name__)

MAX_READERS = 256
ANSWER_S = 10.0
IDLE_S = 60.0


def block_digest(memory: BlockMemory, group: int, block_id: int) -> str:
    """Checksum of a block, all its layers."""
    return xxh3_128_digest(memory.content(group, block_id)).hex()


@dataclass(slots=True)
class _Hold:
    job_id: int
    block_ids: dict[BlockKey, int]
    deadline_s: float


class HeldBlocks:
    """Which blocks are held, by the name that the reader is told. Thread-safe.

    Args:
        timeout_s: Blocks that nobody has read after this time are let go.
        patience_s: How long a reader may come before it is known here that blocks are held.
    """

    def __init__(self, timeout_s: float, patience_s: float = 0.0) -> None:
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._lock = threading.Condition()
        self._holds: dict[str, _Hold] = {}
        self._ended: list[int] = []

    def hold(self, name: str, job: KVTransferJob) -> None:
        """Hold the blocks of a job from now on."""
        block_ids = {block.key: block.block_id for block in job.blocks}
        with self._lock:
            self._holds[name] = _Hold(job.job_id, block_ids, time.monotonic() + self._timeout_s)
            self._lock.notify_all()

    def find(self, name: str) -> Mapping[BlockKey, int]:
        """The blocks that are held under a name. Raises PeerError."""
        with self._lock:
            if not self._lock.wait_for(lambda: name in self._holds, self._patience_s):
                raise PeerError("no blocks are held for this request: they were read, or the time for it is over")
            return self._holds[name].block_ids

    def let_go(self, name: str) -> bool:
        """The blocks may be written from now on; whether they were held until now."""
        with self._lock:
            hold = self._holds.pop(name, None)
            if hold is None:
                return False
            self._ended.append(hold.job_id)
            return True

    def take_ended(self) -> list[int]:
        """Jobs that have ended since the last call, those for which the time is over among them."""
        now_s = time.monotonic()
        with self._lock:
            for name in [name for name, hold in self._holds.items() if hold.deadline_s <= now_s]:
                _logger.warning("nobody read the blocks held for %s within %g s", name, self._timeout_s)
                self._ended.append(self._holds.pop(name).job_id)
            ended, self._ended = self._ended, []
            return ended


class BlockServer:
    """Serves held blocks.

    Args:
        listener: A listening socket; closed with this.
        held: The blocks.
        memory: Where they lie.
        identity: What readers must have equal: member of the message -> value.
        describe: What a reader has to know to read by the transport.
        has_checksums: Readers are told checksums.
    """

    def __init__(
        self,
        listener: socket.socket,
        held: HeldBlocks,
        memory: BlockMemory,
        identity: Mapping[str, Any],
        describe: Callable[[], dict[str, Any]],
        *,
        has_checksums: bool = True,
    ) -> None:
        self._listener = listener
        self._held = held
        self._memory = memory
        self._identity = identity
        self._describe = describe
        self._has_checksums = has_checksums
        self._slots = threading.Semaphore(MAX_READERS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="quire-kv-peers", daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)
                continue
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="quire-kv-peer", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    self._answer(sock)
                except (PeerError, KeyError, TypeError, ValueError, IndexError) as error:
                    send_message(sock, {"error": f"{error}"}, time.monotonic() + ANSWER_S)
        finally:
            self._slots.release()

    def _answer(self, sock: socket.socket) -> None:
        """Serve one reader: what it opens, reads and closes."""
        message = receive_message(sock, time.monotonic() + ANSWER_S)
        if message["op"] == "release":
            with contextlib.suppress(PeerError):
                self._held.find(message["request"])  # this rank may hear of it in a moment only
            self._held.let_go(message["request"])
            return
        if message["op"] != "open":
            raise PeerError(f"{message['op']!r} is not what a reader begins with")
        self._check(message)
        name = message["request"]
        block_ids = self._held.find(name)
        keys = [BlockKey(group, bytes.fromhex(block_hash)) for group, block_hash in message["blocks"]]
        if any(key not in block_ids for key in keys):
            raise PeerError("the request holds other blocks: its prompt, adapter, media or salt is another one")
        places = [(key.group, block_ids[key]) for key in keys]
        opened = {"block_ids": [block_id for _, block_id in places], "how": self._describe()}
        send_message(sock, opened, time.monotonic() + ANSWER_S)
        while (message := receive_message(sock, time.monotonic() + IDLE_S))["op"] == "read":
            for index in message["blocks"]:
                send(sock, [memoryview(self._memory.content(*places[index]))], time.monotonic() + ANSWER_S)
        if message["op"] != "close":
            raise PeerError(f"{message['op']!r} is not what a reader ends with")
        # They are held until after this, or were not, and the reader throws them away.
        digests = [block_digest(self._memory, *place) for place in places] if self._has_checksums else []
        send_message(sock, {"held": self._held.let_go(name), "digests": digests}, time.monotonic() + ANSWER_S)

    def _check(self, message: Mapping[str, Any]) -> None:
        if message["version"] != PEER_VERSION:
            raise PeerError(f"this engine speaks version {PEER_VERSION}, not {message['version']}")
        for name, value in self._identity.items():
            if message[name] != value:
                raise PeerError(f"engines differ in {name}: {message[name]} and {value}")

    def close(self) -> None:
        """Take no more readers. Idempotent."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
