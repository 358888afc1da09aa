"""A tier in a dictionary: a second, plain implementation of both halves of a KV tier, and a `FakeRunner` that has one.

Nothing happens in the background: loads end when somebody calls `MemoryTier.finish_loads`, or at the next poll if
`finishes_alone`. So tests decide what overtakes what, and what gets lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quire_interfaces import (
    BlockKey,
    BlockMemory,
    BlockTransfer,
    KVTransferJob,
    KVTransferOutput,
    KVTransferPlan,
    ModelRunnerOutput,
    SchedulerOutput,
)
from quire_testkit.fake_runner import FakeRunner

__all__ = ["MemoryConnector", "MemoryTier", "MemoryWorker", "SlotBytes", "TieredFakeRunner"]


class MemoryTier:
    """What both halves share.

    Args:
        finishes_alone: Loads end at the next poll; else only by `finish_loads`.
        max_stores: Blocks that may be under way to the tier at a time.
    """

    def __init__(self, *, finishes_alone: bool = True, max_stores: int = 1000) -> None:
        self.finishes_alone = finishes_alone
        self.max_stores = max_stores
        self.blocks: dict[BlockKey, list[bytes]] = {}
        """Content of each block, one piece per layer of its group. May be changed by tests."""
        self.unfinished: deque[KVTransferJob] = deque()
        """Loads under way, oldest first."""
        self.late: list[int] = []
        """Loads to report as late. May be changed by tests."""
        self.is_stopped = False
        self._finish: Callable[[KVTransferJob, frozenset[BlockKey]], None] | None = None

    def finish_loads(self, count: int | None = None, *, lost: frozenset[BlockKey] = frozenset()) -> None:
        """End the oldest loads, or all; blocks in `lost` do not arrive."""
        for _ in range(len(self.unfinished) if count is None else count):
            assert self._finish is not None
            self._finish(self.unfinished.popleft(), lost)


class MemoryConnector:
    """A `KVConnector` over a `MemoryTier`."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self._wanted: dict[BlockKey, None] = {}
        self._under_way: dict[BlockKey, None] = {}
        self._is_stopped = False

    def contains(self, key: BlockKey) -> bool:
        """Whether it is in the dictionary."""
        return not self._is_stopped and key in self._tier.blocks

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: the dictionary knows."""

    def offer(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Want everything that is new."""
        if not self._is_stopped:
            keys = [BlockKey(group, block_hash) for block_hash in block_hashes]
            self._wanted.update((key, None) for key in keys if key not in self._tier.blocks)

    @property
    def has_stores(self) -> bool:
        """Whether anything is wanted."""
        return bool(self._wanted)

    def take_stores(self, max_blocks: int) -> list[BlockKey]:
        """The oldest that are wanted, as far as there is room."""
        keys = list(self._wanted)[: min(max_blocks, self._tier.max_stores - len(self._under_way))]
        for key in keys:
            del self._wanted[key]
            self._under_way[key] = None
        return keys

    def stored(self, keys: Sequence[BlockKey], arrived: Sequence[bool]) -> None:
        """They are under way no more."""
        for key, _ in zip(keys, arrived, strict=True):
            del self._under_way[key]

    def stop(self) -> None:
        """Want nothing, have nothing."""
        self._is_stopped = True
        self._wanted.clear()


class MemoryWorker:
    """A `KVTransferWorker` over a `MemoryTier`."""

    def __init__(self, tier: MemoryTier, memory: BlockMemory) -> None:
        self._tier = tier
        self._memory = memory
        self._finished: dict[int, list[bool]] = {}
        self._is_closed = False
        tier._finish = self._load

    def begin(self, plan: KVTransferPlan) -> None:
        """Copy stores into the dictionary; put loads on the list."""
        for job_id in plan.acknowledged:
            self._finished.pop(job_id, None)
        for job in plan.stores:
            self._finished[job.job_id] = [self._store(block) for block in job.blocks]
        self._tier.unfinished.extend(plan.loads)

    def _store(self, block: BlockTransfer) -> bool:
        if self._tier.is_stopped or self._is_closed:
            return False
        self._tier.blocks[block.key] = [bytes(each) for each in self._memory.buffers(block.key.group, block.block_id)]
        return True

    def _load(self, job: KVTransferJob, lost: frozenset[BlockKey]) -> None:
        arrived = []
        for block in job.blocks:
            pieces = None if block.key in lost or self._tier.is_stopped else self._tier.blocks.get(block.key)
            buffers = self._memory.buffers(block.key.group, block.block_id)
            for index, buffer in enumerate(buffers):
                # What did not arrive leaves rubbish, as a read that broke off would.
                buffer[:] = b"\xee" * len(buffer) if pieces is None else pieces[index]
            arrived.append(pieces is not None)
        self._finished[job.job_id] = arrived

    def poll(self, waits: bool = False) -> KVTransferOutput | None:
        """All that has ended and was not acknowledged."""
        if self._tier.finishes_alone:
            self._tier.finish_loads()
        unfinished = {job.job_id for job in self._tier.unfinished}
        late = [job_id for job_id in self._tier.late if job_id in unfinished]
        if not (self._finished or late or self._tier.is_stopped):
            return None
        finished = {job_id: list(arrived) for job_id, arrived in self._finished.items()}
        return KVTransferOutput(finished=finished, late=late, stopped=self._tier.is_stopped)

    def close(self) -> None:
        """Nothing runs in the background."""
        self._is_closed = True


class SlotBytes(BlockMemory):
    """The KV of a `FakeRunner` as bytes: eight per slot, in one buffer per block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, bytearray] = {}

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """See `quire_interfaces.BlockMemory`; each group is one layer, and block ids are unique across groups."""
        return [memoryview(self._block(block_id))]

    def _block(self, block_id: int) -> bytearray:
        return self._blocks.setdefault(block_id, bytearray(8 * self._block_size))

    def get(self, place: tuple[int, int]) -> int:
        """What was written at (block, offset)."""
        block_id, offset = place
        return int.from_bytes(self._block(block_id)[8 * offset : 8 * offset + 8], "little")

    def __setitem__(self, place: tuple[int, int], digest: int) -> None:
        block_id, offset = place
        self._block(block_id)[8 * offset : 8 * offset + 8] = digest.to_bytes(8, "little")


class TieredFakeRunner(FakeRunner):
    """A `FakeRunner` with a `MemoryWorker`, which begins transfers even for steps that raise, as a runner must.

    Args:
        tier: Where its blocks go.
        **options: As for `FakeRunner`; all groups have one block size.
    """

    def __init__(self, tier: MemoryTier, **options: Any) -> None:
        super().__init__(**options)
        memory = SlotBytes(self._block_sizes[0])
        self._kv = memory  # type: ignore[assignment]
        self.worker = MemoryWorker(tier, memory)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Begin what is to be moved, run the step, report what has arrived."""
        if output.kv_transfer is not None:
            self.worker.begin(output.kv_transfer)
        result = super().execute(output)
        result.kv_transfer = self.worker.poll()
        return result
