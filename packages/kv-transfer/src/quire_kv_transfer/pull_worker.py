"""The runner's half of a connector that pulls: reads held blocks of other engines, and serves its own.

A load is a thread: it asks the other engine for the blocks by their content hashes, reads them, and asks whether they
were held until now, and for their checksums. Whatever goes wrong, the blocks count as not arrived.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from quire_interfaces import BlockMemory, BlockTransfer, KVTransferJob
from quire_kv_transfer.held_blocks import BlockServer, HeldBlocks, block_digest
from quire_kv_transfer.peer_transports import PeerTransport
from quire_kv_transfer.peer_wire import PEER_VERSION, PeerError, connect, receive_message, send_message

__all__ = ["PullWorker"]

_logger = logging.getLogger(__name__)

WAIT_S = 0.005
MAX_RELEASES = 10_000
CHECKSUM_S = 10.0
WARN_EVERY_S = 10.0


class _Progress:
    """How far a load is."""

    def __init__(self) -> None:
        self.begin_s = self.last_s = time.monotonic()
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes have come."""
        self.num_bytes += num_bytes
        self.last_s = time.monotonic()


class PullWorker:
    """Implements `RequestConnectorWorker`.

    Args:
        memory: The KV cache.
        transport: What moves bytes; closed with this.
        identity: What both engines must have equal.
        held: Blocks of this engine that others may read.
        listener: Where this engine's held blocks are served; None for an engine that only reads. Closed with this.
        rank: Of the ranks that share the model; it reads from the same rank of the other engine.
        peers: Networks in which other engines may be; empty for private ones.
        has_checksums: What arrived is compared with checksums that the other engine makes.
        handshake_timeout_s: An engine that does not answer within this time is taken for dead.
        late_after_s: A load without progress for this time is not waited for.
        min_bandwidth: Nor is one that has brought fewer bytes per second, after that time.
    """

    # Many attributes: what is under way, what has ended, and the bounds of both.

    def __init__(
        self,
        memory: BlockMemory,
        transport: PeerTransport,
        identity: Mapping[str, Any],
        held: HeldBlocks,
        listener: socket.socket | None,
        *,
        rank: int = 0,
        peers: Sequence[str] = (),
        has_checksums: bool = True,
        handshake_timeout_s: float = 1.0,
        late_after_s: float = 1.5,
        min_bandwidth: float = 10e6,
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._identity = {**identity, "transport": transport.name}
        self._rank, self._num_ranks = rank, identity["tensor_parallel_size"]
        self._peers = tuple(peers)
        self._has_checksums = has_checksums
        self._handshake_timeout_s = handshake_timeout_s
        self._late_after_s = late_after_s
        self._min_bandwidth = min_bandwidth
        self._changed = threading.Condition()
        self._finished: dict[int, list[bool]] = {}
        self._under_way: dict[int, _Progress] = {}
        """Loads."""
        self._is_closed = False
        self._warned_s = -WARN_EVERY_S
        self._held = held
        self._server = None
        if listener is not None:
            self._server = BlockServer(
                listener, self._held, memory, self._identity, transport.describe, has_checksums=has_checksums
            )
        self._releases: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_RELEASES)
        threading.Thread(target=self._release, name="quire-kv-release", daemon=True).start()

    def begin(self, loads: Sequence[KVTransferJob], holds: Sequence[KVTransferJob], metadata: bytes | None) -> None:
        """Start to read; blocks are held since their request ended."""
        told = {} if metadata is None else json.loads(metadata)
        mark = self._memory.launched() if loads else None
        for job in loads:
            with self._changed:
                if self._is_closed:
                    self._finished[job.job_id] = [False] * len(job.blocks)
                    continue
                self._under_way[job.job_id] = _Progress()
            where = told["loads"][str(job.job_id)]
            threading.Thread(target=self._load, args=(job, where, mark), name="quire-kv-pull", daemon=True).start()
        for where in told.get("releases", ()):
            with contextlib.suppress(queue.Full):  # the time there will be over some day
                self._releases.put_nowait(where)

    def get_finished(self, waits: bool = False) -> dict[int, list[bool]]:
        """What has ended."""
        ended = self._held.take_ended()
        with self._changed:
            if waits and not (self._finished or ended):
                self._changed.wait(WAIT_S)
            finished, self._finished = self._finished, {}
        finished.update((job_id, []) for job_id in ended)
        return finished

    def late_loads(self) -> list[int]:
        """Loads that make no progress, or too little."""
        if not self._under_way:
            return []
        now_s = time.monotonic()
        with self._changed:
            return [job_id for job_id, progress in self._under_way.items() if self._is_late(progress, now_s)]

    def _is_late(self, progress: _Progress, now_s: float) -> bool:
        since_s = now_s - progress.begin_s
        is_slow = since_s > self._late_after_s and progress.num_bytes < self._min_bandwidth * since_s
        return is_slow or now_s - progress.last_s > self._late_after_s

    def _load(self, job: KVTransferJob, where: Mapping[str, Any], mark: object) -> None:
        arrived = [False] * len(job.blocks)
        try:
            arrived = self._pull(job, where, mark)
        except Exception as error:  # whatever it is, the request can compute its prompt
            self._warn(where, error)
        with self._changed:
            del self._under_way[job.job_id]
            self._finished[job.job_id] = arrived
            self._changed.notify_all()

    def _warn(self, where: Mapping[str, Any], error: Exception) -> None:
        now_s = time.monotonic()
        is_expected = isinstance(error, OSError | KeyError | TypeError | ValueError)
        if now_s - self._warned_s > WARN_EVERY_S or not is_expected:
            self._warned_s = now_s
            place = f"{where.get('host')}:{where.get('port')}"
            _logger.warning(
                "keys and values could not be fetched from the engine at %s: %s", place, error, exc_info=not is_expected
            )

    def _pull(self, job: KVTransferJob, where: Mapping[str, Any], mark: object) -> list[bool]:
        """Whether each block arrived. Raises when the other engine does not do its part."""
        deadline_s = time.monotonic() + self._handshake_timeout_s
        with connect(where["host"], self._port(where), self._peers, deadline_s) as sock:
            blocks = [[block.key.group, block.key.block_hash.hex()] for block in job.blocks]
            message = {"op": "open", "version": PEER_VERSION, "request": where["request"], "blocks": blocks}
            send_message(sock, {**message, **self._identity}, deadline_s)
            opened = receive_message(sock, deadline_s)
            block_ids = opened["block_ids"]
            progress = self._under_way[job.job_id]
            progress.add(0)
            local = [(block.key.group, block.block_id) for block in job.blocks]
            remote = [(group, block_id) for (group, _), block_id in zip(local, block_ids, strict=True)]
            self._transport.read(opened["how"], sock, local, remote, progress.add, after=mark)
            send_message(sock, {"op": "close"}, time.monotonic() + self._handshake_timeout_s)
            closed = receive_message(sock, time.monotonic() + CHECKSUM_S)
        if closed.get("held") is not True:
            raise PeerError("the blocks were let go while they were read")
        if not self._has_checksums:
            return [True] * len(job.blocks)
        arrived = list(map(self._is_whole, job.blocks, closed["digests"]))
        if not all(arrived) or len(arrived) != len(job.blocks):
            raise PeerError(f"{arrived.count(False)} of {len(job.blocks)} blocks are damaged")
        return arrived

    def _port(self, where: Mapping[str, Any]) -> int:
        """Where the same rank of the other engine is. Raises PeerError where that has other ranks."""
        ports: list[int] = where.get("ports") or [where["port"]]
        if len(ports) != self._num_ranks:
            raise PeerError(f"engines differ in tensor_parallel_size: {len(ports)} and {self._num_ranks}")
        return ports[self._rank]

    def _is_whole(self, block: BlockTransfer, digest: str) -> bool:
        return block_digest(self._memory, block.key.group, block.block_id) == digest

    def _release(self) -> None:
        """Tell other engines of blocks that will not be read."""
        while (where := self._releases.get()) is not None:
            deadline_s = time.monotonic() + self._handshake_timeout_s
            with (
                contextlib.suppress(OSError, TypeError, ValueError),
                connect(where["host"], self._port(where), self._peers, deadline_s) as sock,
            ):
                send_message(sock, {"op": "release", "request": where["request"]}, deadline_s)

    def close(self) -> None:
        """Serve and read no more."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            deadline_s = time.monotonic() + self._late_after_s
            while self._under_way and time.monotonic() < deadline_s:
                self._changed.wait(0.05)
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(queue.Full):
            self._releases.put_nowait(None)
        self._transport.close()
