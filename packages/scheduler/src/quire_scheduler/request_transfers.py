"""The scheduler's desk for a connector: fetches what another engine computed of a request, holds what another wants.

As with a tier (`transfers`), a load fills blocks of the prefix cache and touches no request: the request waits
(admission rule "kv_connector"), then finds them, and computes what did not arrive. Blocks of a finished request that
another engine is to read are referenced until the connector's worker reports that they were read, or need not be any
more.

Knows job numbers, content hashes and blocks by the allocator's word; knows no connector and no bytes.
"""

from __future__ import annotations

from typing import Any

from quire_interfaces import (
    AdmissionRule,
    BlockKey,
    BlockTransfer,
    CachedPrefix,
    EngineCoreOutput,
    FinishReason,
    KVTransferJob,
    KVTransferPlan,
    LoadablePrefix,
    ModelRunnerOutput,
    Request,
    RequestConnector,
    RequestFailure,
    Reservation,
    SchedulerOutput,
    SchedulerStats,
    TieredBlockAllocator,
)
from quire_scheduler.scheduler import Scheduler

__all__ = ["ConnectedScheduler", "RequestTransfers"]

_GRANTED = Reservation(True)


class RequestTransfers(AdmissionRule):
    """Loads and holds of one scheduler's connector.

    Args:
        allocator: The scheduler's KV cache.
        connector: What finds, fetches and sends.
        block_size: Tokens of a block, by which prefixes are found.
        fails_on_loss: A request fails when a block that was to be fetched does not arrive; else it computes the block.
    """

    # Many attributes: what is under way, who waits for it, and what the next step is told of it.

    name = "kv_connector"
    holds_queue = False

    def __init__(
        self,
        allocator: TieredBlockAllocator,
        connector: RequestConnector,
        block_size: int,
        *,
        fails_on_loss: bool = False,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._connector = connector
        self._fails_on_loss = fails_on_loss
        self._failed: list[str] = []
        self._last_job_id = 0
        self._loads: dict[int, tuple[BlockTransfer, ...]] = {}
        self._holds: set[int] = set()
        self._late: set[int] = set()
        self._loading: dict[BlockKey, int] = {}
        """Content on its way -> the job that brings it."""
        self._waiting: dict[str, int] = {}
        """Request id -> the load it waits for."""
        self._asked: set[str] = set()
        """Ids of requests for which the connector has given its answer."""
        self._found: dict[str, tuple[int, int]] = {}
        """Request id -> tokens in memory when a load began for it, and tokens with what it brings; until admitted."""
        self._params: dict[str, dict[str, Any]] = {}
        """Request id -> what its client is to hand on; until its last output."""
        self._new_loads: list[KVTransferJob] = []
        self._new_holds: list[KVTransferJob] = []
        self._has_news = False
        """A request ended since the last step, of which the worker may have to be told."""
        self._acknowledged: dict[int, None] = {}
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    def check(self, request: Request) -> None:
        """Let a request pass whose parameters make sense. Raises RequestError."""
        self._connector.check(request)

    def admits(self, request: Request) -> bool:
        """Whether the request waits for no load."""
        return request.request_id not in self._waiting

    def reserve(self, request: Request, cached: CachedPrefix) -> Reservation:
        """Ask the connector, once, for what follows `cached`, and begin to load it."""
        request_id = request.request_id
        if request_id in self._asked or not request.reads_prefix_cache:
            return _GRANTED
        num_tokens = self._connector.get_num_new_matched_tokens(request, cached.num_tokens)
        if num_tokens is None:
            return Reservation(False)
        begin, end = cached.num_tokens // self._block_size, (cached.num_tokens + num_tokens) // self._block_size
        external = frozenset(request.block_hashes[begin:end])
        prefix = self._allocator.find_loadable_prefix(request, cached, lambda key: key.block_hash in external)
        if not prefix.missing:
            self._asked.add(request_id)
            return _GRANTED
        job_id = self._load_of(request, prefix)
        if job_id is None:
            job_id = self._begin_load(request, prefix)
            if job_id is None:
                return Reservation(False, prefix.num_blocks_wanted)
            self._asked.add(request_id)
            self._found[request_id] = (cached.num_tokens, prefix.num_tokens)
        self._waiting[request_id] = job_id
        return Reservation(False)

    def _load_of(self, request: Request, prefix: LoadablePrefix) -> int | None:
        """The job that brings one of the missing blocks already."""
        for group, block in prefix.missing:
            job_id = self._loading.get(BlockKey(group, request.block_hashes[block]))
            if job_id is not None and job_id not in self._late:
                return job_id
        return None

    def _new_job_id(self) -> int:
        self._last_job_id -= 1
        return self._last_job_id

    def _begin_load(self, request: Request, prefix: LoadablePrefix) -> int | None:
        job_id = self._new_job_id()
        blocks = self._allocator.begin_load(job_id, request, prefix)
        if blocks is None:
            return None
        job = KVTransferJob(job_id, blocks)
        self._loads[job_id] = blocks
        self._loading.update((block.key, job_id) for block in blocks)
        self._connector.update_state_after_alloc(request, job)
        self._new_loads.append(job)
        return job_id

    def admitted(self, request: Request) -> None:
        """Count what the connector did for its first admission. Loads themselves are held by no request."""
        found = self._found.pop(request.request_id, None)
        if found is not None:
            num_memory_tokens, num_loadable_tokens = found
            num_brought = min(request.num_cached_tokens, num_loadable_tokens) - num_memory_tokens
            request.num_external_tokens += max(0, num_brought)
            self._num_query_tokens += request.num_tokens - num_memory_tokens
            self._num_hit_tokens += max(0, num_brought)

    def ended(self, request: Request) -> None:
        """Forget the request, and hold its blocks if the connector wants them."""
        request_id = request.request_id
        for entries in (self._waiting, self._found):
            entries.pop(request_id, None)
        self._asked.discard(request_id)
        job = None
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            job_id = self._new_job_id()
            blocks = self._allocator.hold_prefix(job_id, request)
            job = KVTransferJob(job_id, blocks) if blocks else None
        self._has_news = True
        is_held, params = self._connector.request_finished(request, job)
        if params is not None:
            self._params[request_id] = params
        if job is None:
            return
        if is_held:
            self._holds.add(job.job_id)
            self._new_holds.append(job)
        else:
            self._allocator.end_load(job.job_id, [])

    def take_failures(self) -> list[tuple[str, RequestFailure]]:
        """Requests that fail because blocks did not arrive, since the last call."""
        failed, self._failed = self._failed, []
        failure = RequestFailure(
            "keys and values of its prompt could not be fetched, and kv_load_failure_policy is fail"
        )
        return [(request_id, failure) for request_id in failed]

    def with_params(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """The outputs of a step, last ones with what their client is to hand on."""
        if not self._params:
            return outputs
        taken, self._params = self._params, {}
        return [
            output
            if output.finish_reason is None or output.request_id not in taken
            else output._replace(kv_transfer_params=taken[output.request_id])
            for output in outputs
        ]

    def add_counters(self, stats: SchedulerStats) -> None:
        """Tell tokens that the connector brought from those that were in memory."""
        stats.external_prefix_cache_query_tokens_total += self._num_query_tokens
        stats.external_prefix_cache_hit_tokens_total += self._num_hit_tokens
        stats.prefix_cache_hit_tokens_total -= self._num_hit_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether any load or hold is under way."""
        return bool(self._loads or self._holds)

    @property
    def returns_blocks_soon(self) -> bool:
        """Whether any load makes progress."""
        return len(self._loads) > len(self._late)

    def has_work(self, *, is_idle: bool) -> bool:
        """Whether jobs go on, or are to begin, while no request needs a step."""
        return is_idle and (bool(self._loads) or self._has_news)

    def step_planned(self, output: SchedulerOutput, *, is_idle: bool) -> bool:
        """Send jobs with the step."""
        self._has_news = False
        metadata = self._connector.build_connector_meta()
        has_tokens = output.total_num_scheduled_tokens > 0
        waits = is_idle and self.holds_blocks and not self._new_holds
        is_needed = bool(self._new_loads or self._new_holds or metadata is not None or waits)
        if not (is_needed or (has_tokens and self._acknowledged)):
            return False
        plan = output.kv_transfer = output.kv_transfer or KVTransferPlan()
        plan.loads = [*plan.loads, *self._new_loads]
        plan.holds, plan.connector_metadata = self._new_holds, metadata
        plan.acknowledged = [*plan.acknowledged, *self._acknowledged]
        plan.waits = plan.waits or waits
        self._new_loads, self._new_holds = [], []
        self._acknowledged = {}
        return is_needed

    def step_ended(self, result: ModelRunnerOutput) -> None:
        """Take in what the worker reports; a job may be reported several times."""
        news = result.kv_transfer
        if news is None:
            return
        for job_id, arrived in news.finished.items():
            if job_id >= 0:
                continue
            self._acknowledged[job_id] = None
            if job_id in self._loads:
                self._end_load(job_id, arrived)
            elif job_id in self._holds:
                self._holds.discard(job_id)
                self._allocator.end_load(job_id, [])
        for job_id in news.late:
            if job_id in self._loads:
                self._late.add(job_id)
                self._let_go(job_id, has_arrived=False)

    def _end_load(self, job_id: int, arrived: list[bool]) -> None:
        self._allocator.end_load(job_id, arrived)
        for block in self._loads.pop(job_id):
            if self._loading.get(block.key) == job_id:
                del self._loading[block.key]
        self._late.discard(job_id)
        self._let_go(job_id, has_arrived=all(arrived))

    def _let_go(self, job_id: int, *, has_arrived: bool) -> None:
        """Nobody waits for this load any more."""
        for request_id in [request_id for request_id, other_id in self._waiting.items() if other_id == job_id]:
            del self._waiting[request_id]
            if self._fails_on_loss and not has_arrived:
                self._failed.append(request_id)


class ConnectedScheduler(Scheduler):
    """A scheduler with a connector: last outputs say where the request's blocks are held.

    Args:
        *args, **options: As for `Scheduler`; the rule is among `rules`.
        transfers: The rule of the connector.
    """

    def __init__(self, *args: Any, transfers: RequestTransfers, **options: Any) -> None:
        super().__init__(*args, **options)
        self._transfers = transfers

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """As `Scheduler.update`."""
        return self._transfers.with_params(super().update(output, result))
