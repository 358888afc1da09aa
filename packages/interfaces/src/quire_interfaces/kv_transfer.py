"""The seam of KV transfer: blocks of the prefix cache on their way between device memory and a tier outside of it.

A *tier* (a folder on disk, another machine) keeps the KV of whole blocks under their content hashes. It has two halves.
The `KVConnector` sits beside the scheduler: it knows which blocks the tier has and which it wants, and no tensors. The
`KVTransferWorker` sits beside the runner: it copies bytes, and knows no requests. They speak through the steps: a
`KVTransferPlan` goes with a `SchedulerOutput`, a `KVTransferOutput` comes back with a `ModelRunnerOutput`, so the
halves may live in different processes.

A *job* is one batch of blocks to load or to store. Loads take as long as they take, across steps; nobody reads or
writes their blocks until the worker reports them finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire_interfaces.kv_cache import BlockAllocator, CachedPrefix
from quire_interfaces.request import Request

__all__ = [
    "BlockKey",
    "BlockMemory",
    "BlockTransfer",
    "KVConnector",
    "KVTransferJob",
    "KVTransferOutput",
    "KVTransferPlan",
    "KVTransferWorker",
    "LoadablePrefix",
    "TieredBlockAllocator",
]


class BlockKey(NamedTuple):
    """What a tier knows a block by."""

    group: int
    """Index of the KV cache group: equal tokens have other KV in other layers."""
    block_hash: bytes


class BlockTransfer(NamedTuple):
    """One block of a job."""

    key: BlockKey
    block_id: int
    """Where it is, or goes to, in device memory."""


class KVTransferJob(NamedTuple):
    job_id: int
    """Never used twice, for loads and stores together. Those of a tier are 0 and more, those of a `RequestConnector`
    are negative."""
    blocks: tuple[BlockTransfer, ...]


@dataclass(slots=True, kw_only=True)
class KVTransferPlan:
    """What a step asks of the worker. It is begun before anything else of the step, and even if the step then fails."""

    loads: list[KVTransferJob] = field(default_factory=list)
    stores: list[KVTransferJob] = field(default_factory=list)
    holds: list[KVTransferJob] = field(default_factory=list)
    """Blocks of finished requests that nobody writes until the connector's worker reports the job: they are read by
    somebody else, or sent."""
    connector_metadata: bytes | None = None
    """What a `RequestConnector` tells its worker with this step."""
    acknowledged: list[int] = field(default_factory=list)
    """Finished jobs that the scheduler has taken in: they need not be reported again."""
    waits: bool = False
    """Nothing can run until a job has ended: the worker may wait a moment for that."""


@dataclass(slots=True, kw_only=True)
class KVTransferOutput:
    """What the worker reports at the end of a step."""

    finished: dict[int, list[bool]] = field(default_factory=dict)
    """Job -> per block, whether it arrived. A job is reported until it is acknowledged, for a report may be lost with
    the result of a step that is discarded."""
    late: list[int] = field(default_factory=list)
    """Loads that make no progress: not worth waiting for. Their blocks are still not to be touched; the job ends some
    time, and is then reported as finished."""
    stopped: bool = False
    """The tier broke and has been switched off: it takes and gives nothing any more."""


class LoadablePrefix(NamedTuple):
    """A prefix of which each block that is read is in memory or in the tier; valid until the allocator is changed."""

    num_tokens: int
    missing: tuple[tuple[int, int], ...]
    """(group, block of the request) of what only the tier has, in token order."""
    num_blocks_wanted: int
    """Free blocks that `begin_load` takes: those to load into, and cached ones that nobody holds now."""


class TieredBlockAllocator(BlockAllocator, Protocol):
    """A `BlockAllocator` whose prefix cache can be filled from outside."""

    def find_loadable_prefix(
        self, request: Request, cached: CachedPrefix, contains: Callable[[BlockKey], bool]
    ) -> LoadablePrefix:
        """Look further than `cached`, the result of `find_cached_prefix` for this request, with the help of a tier.

        Changes nothing. A prefix no longer than `cached` has no missing blocks.
        """

    def begin_load(self, job_id: int, request: Request, prefix: LoadablePrefix) -> tuple[BlockTransfer, ...] | None:
        """Take the blocks of `prefix` that are in memory, and fresh ones for the missing.

        They belong to the load, not to the request, which may end at any time.

        Returns:
            The blocks to load, in the order of `prefix.missing`; None when there are not enough free blocks: then
            nothing was changed.
        """

    def end_load(self, job_id: int, arrived: Sequence[bool]) -> None:
        """The load is over: make the blocks that arrived findable, and let all of its blocks go (the last ones first
        become evictable)."""

    def hold_prefix(self, job_id: int, request: Request) -> tuple[BlockTransfer, ...]:
        """Keep the cached whole blocks of a request's known tokens, those that a next token reads, from being written
        until `end_load(job_id, [])`. Returns them in token order; none, and nothing is held, where none are cached."""

    def cached_block_id(self, key: BlockKey) -> int | None:
        """The block that holds this content now, None when it is not in memory."""


class KVConnector(Protocol):
    """The scheduler's half of a tier. Calls are cheap: they are made while a step is planned."""

    def contains(self, key: BlockKey) -> bool:
        """Whether the tier has the block, as far as is known; a load may still fail. False once stopped."""

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Find out which of these blocks the tier has, before `contains` is asked for them one by one. A tier that is
        asked over a network does so in one question, and waits a fraction of a second for the answer at most."""

    def offer(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """These blocks were computed and are in memory now; the tier may want them."""

    @property
    def has_stores(self) -> bool:
        """Whether offered blocks wait to be stored, now or when earlier ones have been written."""

    def take_stores(self, max_blocks: int) -> list[BlockKey]:
        """Up to `max_blocks` (at least 1) blocks to store with the next step, as far as more may be under way. Each is
        either answered by `stored`, or was evicted meanwhile: then `stored` says False at once."""

    def stored(self, keys: Sequence[BlockKey], arrived: Sequence[bool]) -> None:
        """What became of blocks that `take_stores` gave."""

    def stop(self) -> None:
        """The worker gave up: want nothing and have nothing from now on."""


class BlockMemory(Protocol):
    """The bytes of the KV cache, block by block.

    `buffers` is all that a cache in host memory needs. One on a device whose steps go on behind the calls that launch
    them implements the others, and need not have `buffers`.
    """

    def buffers(self, group: int, block_id: int) -> list[memoryview]:
        """One writable buffer of bytes per layer of the group, in layer order. They stay valid while they are held."""

    def content(self, group: int, block_id: int) -> bytes:
        """A copy of the bytes of a block that no step under way writes, layer after layer. Any thread may call this."""
        return b"".join(self.buffers(group, block_id))

    def snapshot(self, places: Sequence[tuple[int, int]]) -> Callable[[], list[bytes]]:
        """Copy blocks as the steps launched so far leave them. The thread that launches steps calls this; steps that it
        launches afterwards may overwrite the blocks.

        Args:
            places: (group, block id) of each.

        Returns:
            What waits for the copies and gives the bytes of each block, as `content`. Any thread may call it, once.
        """
        copies = [self.content(*place) for place in places]
        return lambda: copies

    def launched(self) -> object:
        """A mark behind the steps launched so far, for `load`. The thread that launches steps calls this."""
        return None

    def load(
        self, group: int, block_id: int, read: Callable[[Sequence[memoryview]], bool], after: object = None
    ) -> bool:
        """Let `read` write a block's bytes, one buffer per layer, into the cache, which has them when this returns. Any
        thread may call this.

        Args:
            group: The block's group.
            block_id: The block.
            read: Whether it wrote all of them; of a block that it did not write rubbish may be left.
            after: From `launched`: steps before it may still use the block.

        Returns:
            What `read` returned.
        """
        return read(self.buffers(group, block_id))


class KVTransferWorker(Protocol):
    """The runner's half of a tier. One thread calls it; copying goes on in others."""

    def begin(self, plan: KVTransferPlan) -> None:
        """Start the jobs. The bytes of stores have been copied when this returns, for the step that follows may
        overwrite them. Never raises: what cannot be done is reported as not arrived."""

    def poll(self, waits: bool = False) -> KVTransferOutput | None:
        """Report what has ended; None when there is nothing to say. With `waits`, and jobs under way, it may take some
        milliseconds until one of them ends."""

    def close(self) -> None:
        """Write what was begun, within a bounded time, and end all threads; the memory is not touched afterwards.
        Idempotent."""
