"""The scheduler's desk for a tier: starts loads for waiting requests, sends off stores, takes in what became of them.

A request whose KV the tier has waits (admission rule "kv_loading") until the load is over, and others pass. Then it is
admitted like any other and finds the blocks in the prefix cache: a load never touches a request. If blocks did not
arrive, or were evicted before the request's turn came, it computes them; it asks the tier once per stay in the queue,
so this ends. Requests that want blocks which another's load is bringing wait for that load.

Knows job numbers, content hashes and blocks by the allocator's word; knows no tier and no bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from quire_interfaces import (
    AdmissionRule,
    BlockKey,
    BlockTransfer,
    CachedPrefix,
    KVConnector,
    KVTransferJob,
    KVTransferOutput,
    KVTransferPlan,
    LoadablePrefix,
    ModelRunnerOutput,
    Request,
    RequestFailure,
    Reservation,
    SchedulerOutput,
    SchedulerStats,
    TieredBlockAllocator,
)

__all__ = ["KVTransfers"]

MIN_STEP_STORES = 4
TOKENS_PER_STORE = 8
"""A step copies at most one block for so many of its tokens, so that stores are not felt in it: in a prefill of blocks
of 16 tokens twice what it computes, in a decode a few of those that a prefill left."""


_GRANTED = Reservation(True)


@dataclass(slots=True)
class _FirstLookup:
    """What was found for a request before its first admission; for statistics."""

    num_memory_tokens: int
    """Tokens that memory had when the tier was first asked."""
    num_loadable_tokens: int = 0
    """Tokens that it would have with what the tier began to load for the request."""


class KVTransfers(AdmissionRule):
    """Loads and stores of one scheduler: the admission rule that holds requests back while they load.

    Args:
        allocator: The scheduler's KV cache.
        connector: The tier.
        fails_on_loss: A request fails when a block that the tier said it had does not arrive; else it computes the
            block.
    """

    name = "kv_loading"
    holds_queue = False

    def __init__(self, allocator: TieredBlockAllocator, connector: KVConnector, *, fails_on_loss: bool = False) -> None:
        self._allocator = allocator
        self._fails_on_loss = fails_on_loss
        self._failed: list[str] = []
        """Ids of requests that a loss failed, until they are taken."""
        self._connector = connector
        self._next_job_id = 0
        self._loads: dict[int, tuple[BlockTransfer, ...]] = {}
        self._stores: dict[int, tuple[BlockTransfer, ...]] = {}
        self._late: set[int] = set()
        self._loading: dict[BlockKey, int] = {}
        """Content on its way -> the job that brings it."""
        self._waiting: dict[str, int] = {}
        """Request id -> the load it waits for."""
        self._looked_up: set[str] = set()
        """Ids of requests for whose blocks the tier was asked to look, in this stay in the queue."""
        self._asked: set[str] = set()
        """Ids of requests for which the tier was asked in this stay in the queue."""
        self._lookups: dict[str, _FirstLookup] = {}
        """By request id, until the first admission."""
        self._num_query_tokens = 0
        self._num_hit_tokens = 0
        self._new_loads: list[KVTransferJob] = []
        self._acknowledged: dict[int, None] = {}

    def admits(self, request: Request) -> bool:
        """Whether the request waits for no load."""
        return request.request_id not in self._waiting

    def reserve(self, request: Request, cached: CachedPrefix) -> Reservation:
        """Ask the tier for what follows `cached`, once per stay in the queue, and begin to load it."""
        request_id = request.request_id
        if request_id in self._asked or not request.reads_prefix_cache:
            return _GRANTED
        if request_id not in self._looked_up:
            self._looked_up.add(request_id)
            self._look_up(request, cached)
        prefix = self._allocator.find_loadable_prefix(request, cached, self._connector.contains)
        if request.num_cached_tokens < 0:
            self._lookups.setdefault(request_id, _FirstLookup(cached.num_tokens))
        job_id = self._load_of(request, prefix)
        if not prefix.missing or job_id in self._late:
            self._asked.add(request_id)
            return _GRANTED
        if job_id is None:
            job_id = self._begin_load(request, prefix)
            if job_id is None:
                return Reservation(False, prefix.num_blocks_wanted)
            self._asked.add(request_id)
        self._waiting[request_id] = job_id
        if request_id in self._lookups:
            self._lookups[request_id].num_loadable_tokens = prefix.num_tokens
        return Reservation(False)

    def _look_up(self, request: Request, cached: CachedPrefix) -> None:
        """Have the tier look for all whole blocks behind those in memory, in one question."""
        hashes = request.block_hashes[len(cached.block_ids[0]) :]
        groups = range(self._allocator.num_groups)
        self._connector.look_up([BlockKey(group, block_hash) for block_hash in hashes for group in groups])

    def take_failures(self) -> list[tuple[str, RequestFailure]]:
        """Requests that fail because blocks did not arrive, since the last call."""
        failed, self._failed = self._failed, []
        failure = RequestFailure("a block of its prefix could not be loaded, and kv_load_failure_policy is fail")
        return [(request_id, failure) for request_id in failed]

    def admitted(self, request: Request) -> None:
        """Count what the tier did for its first admission. Loads themselves are held by no request."""
        lookup = self._lookups.pop(request.request_id, None)
        if lookup is not None:
            num_found = min(request.num_cached_tokens, lookup.num_loadable_tokens)
            request.num_external_tokens = max(0, num_found - lookup.num_memory_tokens)
            self._num_query_tokens += request.num_tokens - lookup.num_memory_tokens
            self._num_hit_tokens += request.num_external_tokens

    def released(self, request: Request) -> None:
        """It may come back, and ask again."""
        self._asked.discard(request.request_id)
        self._looked_up.discard(request.request_id)

    def ended(self, request: Request) -> None:
        """Forget it. A load on its behalf goes on: the next request may want the same."""
        self._waiting.pop(request.request_id, None)
        self._lookups.pop(request.request_id, None)
        self._asked.discard(request.request_id)
        self._looked_up.discard(request.request_id)

    def add_counters(self, stats: SchedulerStats) -> None:
        """Tell tokens that the tier brought from those that were in memory."""
        stats.external_prefix_cache_query_tokens_total = self._num_query_tokens
        stats.external_prefix_cache_hit_tokens_total = self._num_hit_tokens
        stats.prefix_cache_hit_tokens_total -= self._num_hit_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether any load is under way."""
        return bool(self._loads)

    @property
    def returns_blocks_soon(self) -> bool:
        """Whether any load makes progress."""
        return len(self._loads) > len(self._late)

    def has_work(self, *, is_idle: bool) -> bool:
        """Whether loads or stores go on while no request needs a step."""
        return is_idle and bool(self._loads or self._connector.has_stores)

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

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """Send jobs with the step.

        Stores are chosen last, among the blocks that are still findable: their content is whole, for the steps before
        have computed it, and it is copied before this step can overwrite it.
        """
        num_tokens = output.total_num_scheduled_tokens
        stores = []
        if num_tokens or is_idle:
            stores = self._new_stores(sys.maxsize if is_idle else max(MIN_STEP_STORES, num_tokens // TOKENS_PER_STORE))
        waits = self.has_work(is_idle=is_idle)
        if not (self._new_loads or stores or waits or (num_tokens and self._acknowledged)):
            return False
        output.kv_transfer = KVTransferPlan(
            loads=self._new_loads, stores=stores, acknowledged=list(self._acknowledged), waits=waits
        )
        self._new_loads = []
        self._acknowledged = {}
        return True

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

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Take in what the worker reports; a job may be reported several times."""
        if result.kv_transfer is not None:
            self._collect(result.kv_transfer)

    def _collect(self, output: KVTransferOutput) -> None:
        for job_id, arrived in output.finished.items():
            self._acknowledged[job_id] = None
            if job_id in self._loads:
                self._end_load(job_id, arrived)
            elif job_id in self._stores:
                self._connector.stored([block.key for block in self._stores.pop(job_id)], arrived)
        for job_id in output.late:
            if job_id in self._loads:
                self._late.add(job_id)
                self._let_go(job_id, has_arrived=False)
        if output.stopped:
            self._connector.stop()

    def _end_load(self, job_id: int, arrived: list[bool]) -> None:
        self._allocator.end_load(job_id, arrived)
        for block in self._loads.pop(job_id):
            del self._loading[block.key]
        self._late.discard(job_id)
        self._let_go(job_id, has_arrived=all(arrived))

    def _let_go(self, job_id: int, *, has_arrived: bool) -> None:
        """Nobody waits for this load any more."""
        for request_id in [request_id for request_id, other_id in self._waiting.items() if other_id == job_id]:
            del self._waiting[request_id]
            if self._fails_on_loss and not has_arrived:
                self._failed.append(request_id)
