"""How the bytes of held blocks come from one engine to another: by NIXL, or over the connection of the messages."""

from __future__ import annotations

import base64
import ctypes
import importlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from quire_interfaces import BlockMemory, ConfigError
from quire_kv_transfer.peer_wire import PeerError, send_message
from quire_kv_transfer.store_wire import receive_into

__all__ = ["NixlTransport", "PeerError", "PeerTransport", "Place", "SocketTransport", "read_batches", "read_pieces"]

Place = tuple[int, int]
"""(group, block id)."""

PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.005
BATCH_BYTES = 64 << 20
"""Bytes of one transfer: it must end within the time after which a load counts as late."""


class PeerTransport(Protocol):
    """Reads blocks of another engine into this one's. Thread-safe."""

    name: str

    def describe(self) -> dict[str, Any]:
        """What a reader has to know of this engine, as JSON."""

    def read(
        self,
        how: dict[str, Any],
        sock: socket.socket,
        local: Sequence[Place],
        remote: Sequence[Place],
        progressed: Callable[[int], None],
        *,
        after: object,
    ) -> None:
        """Read blocks; returns when nothing is written to them any more.

        Args:
            how: What the other engine's `describe` said.
            sock: The connection to it.
            local: Blocks to write.
            remote: Their counterparts.
            progressed: To be called with the number of bytes that have come since the last call.
            after: From `BlockMemory.launched`: steps before it may still use the local blocks.

        Raises:
            OSError, PeerError: they did not all arrive.
        """

    def close(self) -> None:
        """Let go of the memory. Idempotent."""


class SocketTransport:
    """Bytes over the connection itself: needs no package, and copies twice.

    Args:
        memory: The KV cache.
        stall_s: Seconds without a byte after which the other side is given up.
    """

    name = "socket"

    def __init__(self, memory: BlockMemory, *, stall_s: float) -> None:
        self._memory = memory
        self._stall_s = stall_s

    def describe(self) -> dict[str, Any]:
        """Nothing more is needed."""
        return {}

    def read(
        self,
        how: dict[str, Any],
        sock: socket.socket,
        local: Sequence[Place],
        remote: Sequence[Place],
        progressed: Callable[[int], None],
        *,
        after: object,
    ) -> None:
        """Read block by block."""
        send_message(sock, {"op": "read", "blocks": list(range(len(local)))}, time.monotonic() + self._stall_s)

        def read(buffers: Sequence[memoryview]) -> bool:
            receive_into(sock, buffers, time.monotonic() + self._stall_s)
            progressed(sum(map(len, buffers)))
            return True

        for place in local:
            self._memory.load(*place, read, after)

    def close(self) -> None:
        """Nothing is held."""


class NixlTransport:
    """Reads of memory by NIXL, whose backend takes what the machines have in common: RDMA, shared memory, TCP.

    Args:
        memory: The KV cache.
        num_blocks: Its blocks.
        num_groups: Its groups.
        backends: NIXL's backends, e.g. "UCX".
        num_threads: Threads of the agent, beside the one that makes progress.

    Raises:
        ConfigError: the package is not there, or no agent can be made.
    """

    name = "nixl"

    def __init__(
        self, memory: BlockMemory, num_blocks: int, num_groups: int, *, backends: Sequence[str], num_threads: int = 0
    ) -> None:
        api = _nixl_api()
        # Per group and layer: address of block 0, distance of blocks, bytes of one.
        self._layers = [
            [_layer(*pair) for pair in zip(memory.buffers(group, 0), memory.buffers(group, 1), strict=True)]
            for group in range(num_groups)
        ]
        regions = sorted({(base, num_blocks * stride) for layers in self._layers for base, stride, _ in layers})
        self._name = f"quire-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._peers: dict[str, str] = {}
        """Agent -> the name that NIXL knows it by."""
        try:
            config = api.nixl_agent_config(backends=list(backends), num_threads=num_threads)
            self._agent = api.nixl_agent(self._name, config)
            self._registered = self._agent.register_memory(
                [(base, size, 0, "") for base, size in regions], "DRAM", backends=list(backends)
            )
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot serve the KV cache by {', '.join(backends)}: {error}", field="kv_transfer_config"
            ) from error

    def describe(self) -> dict[str, Any]:
        """The agent, and where its blocks are."""
        with self._lock:
            metadata = self._agent.get_agent_metadata()
        return {"agent": self._name, "metadata": base64.b64encode(metadata).decode(), "layers": self._layers}

    def read(
        self,
        how: dict[str, Any],
        sock: socket.socket,
        local: Sequence[Place],
        remote: Sequence[Place],
        progressed: Callable[[int], None],
        *,
        after: object,
    ) -> None:
        """Read all of them, in transfers of `BATCH_BYTES`."""
        for pieces in read_batches(read_pieces(self._layers, how["layers"], local, remote)):
            self._transfer(how, pieces)
            progressed(sum(size for _, _, size in pieces))

    def _transfer(self, how: dict[str, Any], pieces: Sequence[tuple[int, int, int]]) -> None:
        with self._lock:
            peer = self._peers.get(how["agent"])
            if peer is None:
                added = self._agent.add_remote_agent(base64.b64decode(how["metadata"]))
                peer = self._peers[how["agent"]] = added.decode() if isinstance(added, bytes) else added
            agent = self._agent
            mine = agent.get_xfer_descs([(address, size, 0) for address, _, size in pieces], "DRAM")
            theirs = agent.get_xfer_descs([(address, size, 0) for _, address, size in pieces], "DRAM")
            try:
                transfer = agent.initialize_xfer("READ", mine, theirs, peer)
                state = agent.transfer(transfer)
            except Exception as error:
                self._forget(how["agent"])
                raise PeerError(f"NIXL cannot read from it: {error}") from error
        pause_s = PAUSE_S
        try:
            while state == "PROC":
                time.sleep(pause_s)
                pause_s = min(1.3 * pause_s, LONGEST_PAUSE_S)
                with self._lock:
                    state = agent.check_xfer_state(transfer)
        except Exception as error:
            state = f"ERR: {error}"
        with self._lock:
            agent.release_xfer_handle(transfer)
            if state != "DONE":
                self._forget(how["agent"])
                raise PeerError(f"NIXL reports {state}")

    def _forget(self, name: str) -> None:
        """The other engine is gone, or came back as another agent."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer)
            except Exception as error:
                logging.getLogger(__name__).debug("NIXL cannot remove agent %s: %s", peer, error)

    def close(self) -> None:
        """Deregister the memory."""
        with self._lock:
            registered, self._registered = self._registered, None
            if registered is not None:
                self._agent.deregister_memory(registered)


def _nixl_api() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"NixlConnector needs the package nixl, which cannot be imported ({error}): install "
            "quire-kv-transfer[nixl], or take kv_connector SocketConnector, which needs none",
            field="kv_transfer_config",
        ) from error


def _layer(first: memoryview, second: memoryview) -> tuple[int, int, int]:
    """(address of block 0, distance of blocks, bytes of one) of a layer, from its first two blocks."""
    base, after = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (first, second))
    return base, after - base, first.nbytes


def read_pieces(
    local_layers: Sequence[Sequence[Sequence[int]]],
    remote_layers: Sequence[Sequence[Sequence[int]]],
    local: Sequence[Place],
    remote: Sequence[Place],
) -> list[tuple[int, int, int]]:
    """(address here, address there, bytes) of what is to be read; neighbours on both sides as one. Raises PeerError."""
    pieces: list[list[int]] = []
    for group, (mine, theirs) in enumerate(zip(local_layers, remote_layers, strict=True)):
        pairs = [(here, there) for (place, here), (_, there) in zip(local, remote, strict=True) if place == group]
        for (here_base, here_stride, size), (there_base, there_stride, there_size) in zip(mine, theirs, strict=True):
            if size != there_size:
                raise PeerError(f"a block of a layer has {there_size} bytes there and {size} here")
            last: list[int] | None = None
            for here, there in pairs:
                piece = [here_base + here * here_stride, there_base + there * there_stride, size]
                if last and last[0] + last[2] == piece[0] and last[1] + last[2] == piece[1]:
                    last[2] += size
                else:
                    pieces.append(piece)
                    last = piece
    return [(here, there, size) for here, there, size in pieces]


def read_batches(pieces: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """The pieces in lists of about `BATCH_BYTES`; longer ones are cut."""
    batch: list[tuple[int, int, int]] = []
    room = BATCH_BYTES
    for here, there, size in pieces:
        start = 0
        while start < size:
            length = min(size - start, room)
            batch.append((here + start, there + start, length))
            start, room = start + length, room - length
            if not room:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch
