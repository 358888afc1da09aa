"""The runner's half of the tiers: copies blocks between the KV cache's memory and the tiers, in two threads.

Reading has a thread of its own, so that a request that waits for its prefix does not wait for what others wrote. Loads
are read into their blocks, which nobody else uses meanwhile: straight, where the KV cache is in host memory. Stores are
written from copies.

A block that is damaged or foreign counts as not arrived. When no tier is left that works, the engine goes on without.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from quire_interfaces import (
    BlockKey,
    BlockMemory,
    BlockTransfer,
    KVTransferJob,
    KVTransferOutput,
    KVTransferPlan,
)

__all__ = ["TierBlocks", "TierWorker"]

_logger = logging.getLogger(__name__)

READ_AHEAD = 4
"""Files that the disk is asked for before they are read: a quarter to a third faster than one after the other."""
WAIT_S = 0.005
"""How long `poll` waits for the end of a job."""
SLOW_AFTER_S = 1.5
SLOW_BYTES_PER_S = 1e6
"""Loads are late, too, when reading has gone on for so long and brought less: computing is faster."""
READER_GRACE_S = 0.5
WRITER_GRACE_S = 2.0
"""How long `close` waits for the threads."""

_Stores = tuple[KVTransferJob, Callable[[], list[bytes]]]
"""Blocks to write, and what waits for their bytes (`BlockMemory.snapshot`)."""
_Loads = tuple[KVTransferJob, object]
"""Blocks to read, and the mark behind the steps that may use them (`BlockMemory.launched`)."""
_Block = TypeVar("_Block")


class TierBlocks(Protocol):
    """Blocks of the tiers, as bytes."""

    @property
    def is_stopped(self) -> bool:
        """Whether no tier is left."""

    @property
    def names(self) -> str:
        """What the tiers are called, for logs."""

    def expect(self, key: BlockKey) -> None:
        """The block will be read soon."""

    def read(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Read a block into its place; whether there was one, whole."""

    def write(self, key: BlockKey, payload: bytes | memoryview) -> bool:
        """Write a block; whether it was taken."""

    def close(self) -> None:
        """Let go of connections and memory."""


class TierWorker:
    """Implements `quire_interfaces.KVTransferWorker`.

    Args:
        blocks: The tiers; closed with the worker.
        memory: The KV cache.
        late_after_s: When no block has been read for this time, the loads under way are reported as late.
    """

    def __init__(self, blocks: TierBlocks, memory: BlockMemory, *, late_after_s: float = 10.0) -> None:
        self._blocks = blocks
        self._memory = memory
        self._late_after_s = late_after_s
        self._changed = threading.Condition()
        self._finished: dict[int, list[bool]] = {}
        self._loading: dict[int, None] = {}
        self._storing: dict[int, None] = {}
        self._progress_s = self._reading_s = time.monotonic()
        self._read_bytes = 0
        """Bytes that loads have brought since there were none before them, at `_reading_s`."""
        self._is_closed = False
        self._loads: queue.SimpleQueue[_Loads | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Stores | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_jobs, name="quire-kv-reader", daemon=True)
        self._writer = threading.Thread(target=self._write_jobs, name="quire-kv-writer", daemon=True)
        self._reader.start()
        self._writer.start()
        atexit.register(self.close)  # a process that ends closes nothing, and freezes these threads

    def begin(self, plan: KVTransferPlan) -> None:
        """Start the jobs of a plan."""
        with self._changed:
            for job_id in plan.acknowledged:
                self._finished.pop(job_id, None)
            if self._is_closed:
                for job in (*plan.loads, *plan.stores):
                    self._finished[job.job_id] = [False] * len(job.blocks)
                return
            if plan.loads and not self._loading:
                self._progress_s = self._reading_s = time.monotonic()
                self._read_bytes = 0
            self._loading.update((job.job_id, None) for job in plan.loads)
            self._storing.update((job.job_id, None) for job in plan.stores)
        mark = self._memory.launched() if plan.loads else None
        for job in plan.loads:
            self._loads.put((job, mark))
        for job in plan.stores:
            try:
                copies = self._memory.snapshot([(block.key.group, block.block_id) for block in job.blocks])
            except Exception:  # such as no memory on the device: no reason for the step to fail
                _logger.exception("blocks of the KV cache could not be copied for %s", self._blocks.names)
                self._end(self._storing, job.job_id, [False] * len(job.blocks))
            else:
                self._stores.put((job, copies))

    def poll(self, waits: bool = False) -> KVTransferOutput | None:
        """What has ended."""
        with self._changed:
            if waits and not self._finished and (self._loading or self._storing):
                self._changed.wait(WAIT_S)
            now_s = time.monotonic()
            reading_s = now_s - self._reading_s
            is_slow = reading_s > SLOW_AFTER_S and 0 < self._read_bytes < reading_s * SLOW_BYTES_PER_S
            is_late = now_s - self._progress_s > self._late_after_s or is_slow
            late = list(self._loading) if is_late else []
            if not (self._finished or late or self._blocks.is_stopped):
                return None
            return KVTransferOutput(finished=dict(self._finished), late=late, stopped=self._blocks.is_stopped)

    def close(self) -> None:
        """Write what was begun, drop what is still to be read, end the threads."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._loads.put(None)
        self._stores.put(None)
        self._reader.join(READER_GRACE_S)
        self._writer.join(WRITER_GRACE_S)
        if self._reader.is_alive() or self._writer.is_alive():
            _logger.warning("the %s does not answer; what was not written yet is lost", self._blocks.names)
        self._blocks.close()

    def _read_jobs(self) -> None:
        while (asked := self._loads.get()) is not None:
            job, mark = asked
            arrived = []
            for index, block in enumerate(job.blocks):
                ahead = slice(1, READ_AHEAD + 1) if index == 0 else slice(index + READ_AHEAD, index + READ_AHEAD + 1)
                for upcoming in job.blocks[ahead]:
                    self._blocks.expect(upcoming.key)
                arrived.append(self._attempt(partial(self._load, mark), block))
            self._end(self._loading, job.job_id, arrived)

    def _write_jobs(self) -> None:
        while (asked := self._stores.get()) is not None:
            job, copied = asked
            arrived = [False] * len(job.blocks)
            try:
                copies = copied()
            except Exception:
                _logger.exception("blocks of the KV cache could not be copied for %s", self._blocks.names)
            else:
                keys = [block.key for block in job.blocks]
                arrived = [self._attempt(self._store, each) for each in zip(keys, copies, strict=True)]
            self._end(self._storing, job.job_id, arrived)

    def _end(self, under_way: dict[int, None], job_id: int, arrived: list[bool]) -> None:
        with self._changed:
            del under_way[job_id]
            self._finished[job_id] = arrived
            self._changed.notify_all()

    def _attempt(self, move: Callable[[_Block], bool], block: _Block) -> bool:
        """Move one block; whatever goes wrong is no reason for a thread to end."""
        if self._blocks.is_stopped:
            return False
        try:
            return move(block)
        except Exception:
            _logger.exception("a block could not be copied between the KV cache and %s", self._blocks.names)
            return False

    def _load(self, mark: object, block: BlockTransfer) -> bool:
        if self._is_closed:
            return False
        try:
            return self._memory.load(block.key.group, block.block_id, partial(self._read, block.key), mark)
        finally:
            self._progress_s = time.monotonic()

    def _read(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        self._read_bytes += sum(map(len, buffers))
        return self._blocks.read(key, buffers)

    def _store(self, copy: tuple[BlockKey, bytes]) -> bool:
        return self._blocks.write(*copy)
