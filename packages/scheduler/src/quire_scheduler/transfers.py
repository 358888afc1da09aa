"""The scheduler's desk for a tier: starts loads for waiting requests, sends off stores, takes in what became of them.

A request whose KV the tier has waits (admission rule "kv_loading") until the load is over, and others pass. Then it is
admitted like any other and finds the blocks in the prefix cache: a load never touches a request. If blocks did not
arrive, or were evicted before the request's turn came, it computes them; it asks the tier once per stay in the queue,
so this ends. Requests that want blocks which another's load is bringing wait for that load.

Knows job numbers, content hashes and blocks by the allocator's word; knows no tier and no bytes.
"""

from __future__ import annotations

import enum
import sys

from quire_interfaces import (
    BlockKey,
    BlockTransfer,
    CachedPrefix,
    KVConnector,
    KVTransferJob,
    KVTransferOutput,
    KVTransferPlan,
    LoadablePrefix,
    Request,
    TieredBlockAllocator,
)
from quire_scheduler.state import RequestState

__all__ = ["KVTransfers", "Lookup"]

MIN_STEP_STORES = 4
TOKENS_PER_STORE = 8
"""A step copies at most one block for so many of its tokens, so that stores are not felt in it: in a prefill of blocks
of 16 tokens twice what it computes, in a decode a few of those that a prefill left."""


class Lookup(enum.Enum):
    """What came of asking the tier for a request."""

    COMPUTE = enum.auto()
    """Nothing more is to be had: go on with what is in memory."""
    LOADING = enum.auto()
    """Its blocks are on their way; `KVTransfers.admits` says when to look again."""
    NO_ROOM = enum.auto()
    """There are too few free blocks to load into."""


class KVTransfers:
    """Loads and stores of one scheduler; also the admission rule that holds requests back while they load.

    Args:
        allocator: The scheduler's KV cache.
        connector: The tier.
    """

    name = "kv_loading"
    holds_queue = False

    def __init__(self, allocator: TieredBlockAllocator, connector: KVConnector) -> None:
        self._allocator = allocator
        self._connector = connector
        self._next_job_id = 0
        self._loads: dict[int, tuple[BlockTransfer, ...]] = {}
        self._stores: dict[int, tuple[BlockTransfer, ...]] = {}
        self._late: set[int] = set()
        self._loading: dict[BlockKey, int] = {}
        """Content on its way -> the job that brings it."""
        self._waiting: dict[str, int] = {}
        """Request id -> the load it waits for."""
        self._new_loads: list[KVTransferJob] = []
        self._acknowledged: dict[int, None] = {}

    def admits(self, request: Request) -> bool:
        """Whether the request waits for no load."""
        return request.request_id not in self._waiting

    def admitted(self, request: Request) -> None:
        """Nothing to do: loads are not held by requests."""

    def released(self, request: Request) -> None:
        """Nothing to do."""

    def forget(self, request: Request) -> None:
        """The request ended in the queue. A load on its behalf goes on: the next one may want the same."""
        self._waiting.pop(request.request_id, None)

    @property
    def holds_blocks(self) -> bool:
        """Whether loads hold blocks, which come back some time."""
        return bool(self._loads)

    @property
    def returns_blocks_soon(self) -> bool:
        """Whether loads hold blocks that are worth waiting for."""
        return len(self._loads) > len(self._late)

    def has_plan(self, *, is_idle: bool) -> bool:
        """Whether `take_plan` would have anything for a step without entries."""
        return is_idle and bool(self._loads or self._connector.has_stores)

    def look_up(self, state: RequestState, cached: CachedPrefix) -> Lookup:
        """Ask the tier for what follows `cached`, the prefix that was just found in memory."""
        request = state.request
        if state.tier_asked or not request.reads_prefix_cache:
            return Lookup.COMPUTE
        prefix = self._allocator.find_loadable_prefix(request, cached, self._connector.contains)
        if state.num_memory_tokens < 0:
            state.num_memory_tokens = cached.num_tokens
        job_id = self._load_of(request, prefix)
        if not prefix.missing or job_id in self._late:
            state.tier_asked = True
            return Lookup.COMPUTE
        if job_id is None:
            job_id = self._begin_load(request, prefix)
            if job_id is None:
                state.num_blocks_wanted = prefix.num_blocks_wanted
                return Lookup.NO_ROOM
            state.tier_asked = True
        self._waiting[request.request_id] = job_id
        state.num_loadable_tokens = prefix.num_tokens
        return Lookup.LOADING

    def _load_of(self, request: Request, prefix: LoadablePrefix) -> int | None:
        """The job that brings one of the missing blocks already."""
        if self._loading:
            hashes = request.block_hashes
            for group, block in prefix.missing:
                job_id = self._loading.get(BlockKey(group, hashes[block]))
                if job_id is not None:
                    return job_id
        return None

    def _begin_load(self, request: Request, prefix: LoadablePrefix) -> int | None:
        job_id = self._next_job_id
        blocks = self._allocator.begin_load(job_id, request, prefix)
        if blocks is None:
            return None
        self._next_job_id += 1
        self._loads[job_id] = blocks
        self._loading.update((block.key, job_id) for block in blocks)
        self._new_loads.append(KVTransferJob(job_id, blocks))
        return job_id

    def take_plan(self, *, num_tokens: int, is_idle: bool) -> KVTransferPlan | None:
        """What to send with a step that is otherwise planned.

        Stores are chosen last, among the blocks that are still findable: their content is whole, for the steps before
        have computed it, and it is copied before this step can overwrite it.

        Args:
            num_tokens: How many the step computes.
            is_idle: It computes none, and no step before it is in flight.
        """
        stores = []
        if num_tokens or is_idle:
            stores = self._new_stores(sys.maxsize if is_idle else max(MIN_STEP_STORES, num_tokens // TOKENS_PER_STORE))
        waits = is_idle and self.has_plan(is_idle=True)
        if not (self._new_loads or stores or waits or (num_tokens and self._acknowledged)):
            return None
        plan = KVTransferPlan(loads=self._new_loads, stores=stores, acknowledged=list(self._acknowledged), waits=waits)
        self._new_loads = []
        self._acknowledged = {}
        return plan

    def _new_stores(self, max_blocks: int) -> list[KVTransferJob]:
        if not self._connector.has_stores:
            return []
        blocks: list[BlockTransfer] = []
        evicted: list[BlockKey] = []
        for key in self._connector.take_stores(max_blocks):
            block_id = self._allocator.cached_block_id(key)
            if block_id is None:
                evicted.append(key)
            else:
                blocks.append(BlockTransfer(key, block_id))
        if evicted:
            self._connector.stored(evicted, [False] * len(evicted))
        if not blocks:
            return []
        job = KVTransferJob(self._next_job_id, tuple(blocks))
        self._next_job_id += 1
        self._stores[job.job_id] = job.blocks
        return [job]

    def take_output(self, output: KVTransferOutput) -> None:
        """Take in what the worker reports; a job may be reported several times."""
        for job_id, arrived in output.finished.items():
            self._acknowledged[job_id] = None
            if job_id in self._loads:
                self._end_load(job_id, arrived)
            elif job_id in self._stores:
                self._connector.stored([block.key for block in self._stores.pop(job_id)], arrived)
        for job_id in output.late:
            if job_id in self._loads:
                self._late.add(job_id)
                self._let_go(job_id)
        if output.stopped:
            self._connector.stop()

    def _end_load(self, job_id: int, arrived: list[bool]) -> None:
        self._allocator.end_load(job_id, arrived)
        for block in self._loads.pop(job_id):
            del self._loading[block.key]
        self._late.discard(job_id)
        self._let_go(job_id)

    def _let_go(self, job_id: int) -> None:
        """Nobody waits for this load any more."""
        for request_id in [request_id for request_id, waited_for in self._waiting.items() if waited_for == job_id]:
            del self._waiting[request_id]
