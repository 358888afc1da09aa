"""`EngineWatch`: what somebody sees who looks into an engine, and `WatchedScheduler`, which is how it is seen.

While an engine is watched, a `WatchedScheduler` stands before its scheduler and notes what each step plans and brings.
When nobody looks it is not there, so that nothing is done or asked. Reports are fetched; who fetches none for `LEASE_S`
looks no more.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from quire_engine.watched_blocks import BlockMap
from quire_engine.watched_requests import RequestRecords, RequestTrace
from quire_interfaces import (
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    NewRow,
    PauseState,
    Request,
    RequestGate,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from quire_interfaces.engine_watch import RequestRecord, StepRecord, WatchCursor, WatchedKVCache, WatchReport

__all__ = ["EngineWatch", "WatchedScheduler"]

LEASE_S = 10.0
"""Who has fetched no report for so long looks no more."""
MAX_STEPS = 2048
"""Steps kept; older ones are not told any more."""
TIMED_STEPS = 16
"""Of so many steps that only decode, one is timed."""
MISS_SHARE = 0.004
"""Share of the time that may go into explanations of cache misses, and how much of it is saved up at most."""
MAX_MISS_CREDIT_S = 0.01


class _OpenStep(NamedTuple):
    """A step whose results are to come."""

    planned_s: float
    num_prefill_tokens: int
    num_prefill_rows: int
    num_draft_tokens: int
    first: list[RequestTrace]
    """Requests whose known tokens are all computed with it."""
    drafts: list[tuple[int, RequestTrace, int, bool]]
    """(entry, request, draft tokens, whether they are certain)."""


# Many attributes: steps, requests and blocks of one engine, which are noted and told together.
class EngineWatch:
    """Notes steps, requests and blocks of an engine. One thread calls everything.

    Args:
        scheduler: The engine's.
        kv_cache: Its KV cache; None where there is none to be shown.
        gates: What requests wait for beside the scheduler; the one named "grammar" is asked.
        block_size: Tokens of a block.
        on_end: Called when nobody looks any more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: WatchedKVCache | None,
        gates: Iterable[RequestGate],
        block_size: int,
        on_end: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._block_size = max(block_size, 1)
        self._has_grammar: Callable[[Request], bool] | None = next(
            (getattr(gate, "admits", None) for gate in gates if getattr(gate, "name", None) == "grammar"), None
        )
        self._on_end = on_end
        self.watch_id = time.monotonic_ns() // 1000
        self._watchers: dict[str, float] = {}
        """Name of each who looks -> until when, if no report is fetched before."""
        self._until_s = math.inf
        """When the last one of them looks no more."""
        self._steps: deque[tuple[float, ...]] = deque(maxlen=MAX_STEPS)
        """Fields of `StepRecord`s."""
        self._num_steps = 0
        self._open: dict[int, _OpenStep | float] = {}
        """Steps in flight; of those that only decode, when they were planned."""
        self._gauges = (0, 0, 0)
        """Of `_measured`."""
        self._rows: dict[int, RequestTrace] = {}
        self._prefilling: dict[int, RequestTrace] = {}
        """Row -> request whose known tokens are not all computed."""
        self._compiling: dict[str, RequestTrace] = {}
        """Requests whose grammar is being compiled."""
        self._records = RequestRecords(scheduler.waiting_reason)
        self._blocks = None if kv_cache is None else BlockMap(kv_cache)
        now_s = time.monotonic()
        self._spent_s, self._told_s = 0.0, now_s
        self._miss_credit_s, self._credited_s = MAX_MISS_CREDIT_S, now_s
        for request in scheduler.requests():
            self._add_present(request, now_s)
        self._gauges = self._measured()

    def _add_present(self, request: Request, now_s: float) -> None:
        """Begin with a request that is there already."""
        trace = self._records.add(request, now_s, is_complete=False)
        if request.row < 0:
            return
        self._rows[request.row] = trace
        trace.num_to_compute = request.num_tokens
        trace.num_computed = min(request.num_computed_tokens, request.num_tokens)
        if trace.num_computed < request.num_prompt_tokens:
            self._prefilling[request.row] = trace
        else:
            trace.num_computed = trace.num_to_compute
        if self._kv_cache is not None and self._blocks is not None:
            for table in self._kv_cache.block_ids(request.request_id):
                trace.block_ids += table
                self._blocks.take(trace.record.number, table, trace.record.num_cached_tokens // self._block_size)

    # What `WatchedScheduler` sees.

    def queued(self, request: Request) -> None:
        """A request was queued."""
        now_s = time.monotonic()
        trace = self._records.add(request, now_s, is_complete=True)
        if request.sampling_params.structured_outputs is not None and self._has_grammar is not None:
            self._compiling[request.request_id] = trace
        self._gauges = self._measured()

    def aborted(self, request_ids: Iterable[str]) -> None:
        """These requests were ended."""
        now_s = time.monotonic()
        for request_id in request_ids:
            trace = self._records.traces.get(request_id)
            if trace is not None:
                self._records.finish(trace, now_s)
        self._gauges = self._measured()

    def planned(self, output: SchedulerOutput, planned_s: float) -> None:
        """A step was planned, at `planned_s`."""
        # Most steps only decode: nothing is noted of them but the time, and every so many is timed for all.
        is_plain = not (
            output.new_rows
            or output.new_block_ids
            or output.freed_rows
            or output.draft_token_ids
            or self._prefilling
            or self._compiling
        )
        if is_plain and output.step_id % TIMED_STEPS:
            self._open[output.step_id] = planned_s
            return
        began_s = time.monotonic()
        self._open[output.step_id] = planned_s if is_plain else self._opened(output, planned_s, began_s)
        self._spent_s += (time.monotonic() - began_s) * (TIMED_STEPS if is_plain else 1)

    def _opened(self, output: SchedulerOutput, planned_s: float, now_s: float) -> _OpenStep:
        """Note what a step does beside decodes."""
        for row in output.freed_rows:
            self._left_row(row, now_s)
        for new in output.new_rows:
            self._entered_row(new, planned_s)
        if self._blocks is not None:
            for row, tables in output.new_block_ids.items():
                trace = self._rows.get(row)
                if trace is not None:
                    for table in tables:
                        trace.block_ids += table
                        self._blocks.grow(trace.record.number, table)
        if self._compiling:
            self._look_at_grammars(now_s)
        num_prefill_tokens = num_prefill_rows = num_draft_tokens = 0
        first: list[RequestTrace] = []
        drafts: list[tuple[int, RequestTrace, int, bool]] = []
        if self._prefilling or output.draft_token_ids:
            entries = dict(zip(output.rows, range(len(output.rows)), strict=True))
            for row, trace in list(self._prefilling.items()):
                entry = entries.get(row)
                if entry is None:
                    continue
                num_tokens = output.num_scheduled_tokens[entry]
                num_prefill_tokens += num_tokens
                num_prefill_rows += 1
                self._records.add_chunk(trace, planned_s, output.num_computed_tokens[entry], num_tokens)
                if output.samples[entry]:
                    trace.num_computed = trace.num_to_compute
                    del self._prefilling[row]
                    first.append(trace)
            for row, token_ids in output.draft_token_ids.items():
                num_draft_tokens += len(token_ids)
                drafting = self._rows.get(row)
                if drafting is not None:
                    drafts.append((entries[row], drafting, len(token_ids), row in output.forced_rows))
                    drafting.has_drafts = True
        self._gauges = self._measured()
        return _OpenStep(planned_s, num_prefill_tokens, num_prefill_rows, num_draft_tokens, first, drafts)

    def _measured(self) -> tuple[int, int, int]:
        """Requests that run and that wait, and blocks in use; as they are until something else than decodes happens."""
        num_used = 0
        if self._kv_cache is not None:
            num_free, num_total = self._kv_cache.usage()
            num_used = num_total - num_free
        return (*self._scheduler.num_requests(), num_used)

    def updated(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The results of a step were taken in."""
        now_s = time.monotonic()
        step = self._open.pop(output.step_id, None)
        if step is None or not output.rows:  # planned before somebody looked, or nothing was computed
            return
        num_rows, num_tokens = len(output.rows), output.total_num_scheduled_tokens
        if isinstance(step, float):
            self._steps.append((self._num_steps, step, now_s, 0, num_tokens, 0, 0, 0, num_rows, *self._gauges))
        else:
            num_prefill, num_drafts = step.num_prefill_tokens, step.num_draft_tokens
            num_accepted = self._take_results(step, result, now_s)
            num_decode = num_tokens - num_prefill - num_drafts
            rows = (step.num_prefill_rows, num_rows - step.num_prefill_rows)
            made = (num_prefill, num_decode, num_drafts, num_accepted)
            self._steps.append((self._num_steps, step.planned_s, now_s, *made, *rows, *self._gauges))
        self._num_steps += 1
        if not output.step_id % TIMED_STEPS:
            self._spent_s += (time.monotonic() - now_s) * TIMED_STEPS
        if now_s > self._until_s:
            self._watchers.clear()
            self._on_end()

    def _take_results(self, step: _OpenStep, result: ModelRunnerOutput, now_s: float) -> int:
        """Note what a step brought beside decodes. Returns the number of accepted draft tokens."""
        num_accepted = 0
        for entry, trace, num_drafts, is_forced in step.drafts:
            num_right = max(0, len(result.sampled_token_ids[entry]) - 1)
            num_accepted += num_right
            record = trace.record
            if is_forced:
                record.num_forced_tokens += num_right
            else:
                record.num_draft_tokens += num_drafts
                record.num_accepted_tokens += num_right
        for trace in step.first:
            if not trace.record.first_token_s and trace.request.output_token_ids:
                trace.record.first_token_s = now_s
                self._records.changed(trace)
        return num_accepted

    def discarded(self, output: SchedulerOutput) -> None:
        """A step failed."""
        self._open.pop(output.step_id, None)

    def _left_row(self, row: int, now_s: float) -> None:
        trace = self._rows.pop(row, None)
        self._prefilling.pop(row, None)
        if trace is None:
            return
        if self._blocks is not None:
            self._blocks.release(trace.record.number, trace.block_ids)
        trace.block_ids, trace.has_drafts = [], False
        if trace.request.is_finished:
            self._records.finish(trace, now_s)
        else:
            self._records.preempted(trace, now_s)

    def _entered_row(self, new: NewRow, planned_s: float) -> None:
        trace = self._records.traces.get(new.request_id)
        if trace is None:  # it ended in the same moment
            return
        self._rows[new.row] = self._prefilling[new.row] = trace
        is_first = not trace.record.scheduled_s
        self._records.entered_row(trace, planned_s, new.num_computed_tokens, len(new.token_ids))
        trace.block_ids = []
        if self._blocks is not None:
            for table in new.block_ids:
                trace.block_ids += table
                self._blocks.take(trace.record.number, table, new.num_computed_tokens // self._block_size)
        if is_first:
            self._explain_miss(trace)

    def _explain_miss(self, trace: RequestTrace) -> None:
        """Ask why the cached prefix ends where it does, as far as there is time for it."""
        began_s = time.monotonic()
        credit_s = self._miss_credit_s + MISS_SHARE * (began_s - self._credited_s)
        self._miss_credit_s, self._credited_s = min(credit_s, MAX_MISS_CREDIT_S), began_s
        if self._kv_cache is not None and self._miss_credit_s > 0:
            miss = self._kv_cache.explain_miss(trace.request)
            trace.record.miss_reason, trace.record.miss_detail = miss.reason, miss.detail
            self._miss_credit_s -= time.monotonic() - began_s

    def _look_at_grammars(self, now_s: float) -> None:
        assert self._has_grammar is not None
        for request_id, trace in list(self._compiling.items()):
            if trace.request.is_finished or self._has_grammar(trace.request):
                trace.record.grammar_s = now_s - trace.record.queued_s
                del self._compiling[request_id]

    # Reports.

    def report(self, watcher: str, cursor: WatchCursor) -> WatchReport:
        """What has happened since a cursor; keeps the watch going.

        Args:
            watcher: Name of who looks.
            cursor: Of its last report.
        """
        began_s = time.monotonic()
        self._watchers[watcher] = self._until_s = began_s + LEASE_S
        reasons = self._records.look(began_s)
        if self._compiling:
            self._look_at_grammars(began_s)
        changes: list[tuple[int, int]] | None = []
        num_changes = 0
        if self._blocks is not None:
            self._blocks.check()
            changes, num_changes = self._blocks.since(cursor.blocks), self._blocks.num_changes
        is_anew = cursor.watch_id != self.watch_id or changes is None
        num_unread = self._num_steps - (0 if is_anew else cursor.steps)
        share = self._spent_s / max(began_s - self._told_s, 1e-9)
        self._spent_s, self._told_s = 0.0, began_s
        report = WatchReport(
            cursor=WatchCursor(self.watch_id, self._num_steps, num_changes, self._records.num_changes),
            is_anew=is_anew,
            now_s=began_s,
            num_blocks=0 if self._blocks is None else self._blocks.num_blocks,
            block_size=self._block_size,
            steps=[StepRecord._make(each) for each in islice(self._steps, max(0, len(self._steps) - num_unread), None)],
            holders=self._blocks.holders() if is_anew and self._blocks is not None else [],
            changes=[] if is_anew or changes is None else changes,
            requests=self._records.alive() if is_anew else self._records.since(cursor.requests),
            rows=self._records.rows(),
            waiting_reasons=reasons,
            watch_share=share,
        )
        self._spent_s = time.monotonic() - began_s
        return report

    def record_of(self, request_id: str) -> RequestRecord | None:
        """The record of a request that is not finished, as of now; None for another."""
        self._records.look(time.monotonic())
        trace = self._records.traces.get(request_id)
        return None if trace is None else trace.record

    def leave(self, watcher: str) -> None:
        """Somebody looks no more."""
        self._watchers.pop(watcher, None)
        if not self._watchers:
            self._on_end()


class WatchedScheduler:
    """A scheduler that tells a watch what it plans and takes in; implements `quire_interfaces.Scheduler`.

    Args:
        inner: Does the work.
        watch: Is told.
    """

    def __init__(self, inner: Scheduler, watch: EngineWatch) -> None:
        self.inner = inner
        self.watch = watch

    def schedule(self, only: frozenset[str] | None = None) -> SchedulerOutput | None:
        """Plan the next step, and tell of it."""
        planned_s = time.monotonic()
        output = self.inner.schedule(only)
        if output is not None:
            self.watch.planned(output, planned_s)
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what a step produced, and tell of it."""
        outputs = self.inner.update(output, result)
        self.watch.updated(output, result)
        return outputs

    def add_request(self, request: Request) -> None:
        """Queue a request, and tell of it."""
        self.inner.add_request(request)
        self.watch.queued(request)

    def abort_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests now, and tell of it; the ids that were alive."""
        aborted_ids = self.inner.abort_requests(request_ids, reason)
        self.watch.aborted(aborted_ids)
        return aborted_ids

    def discard_step(self, output: SchedulerOutput) -> None:
        """Undo a step that failed, and tell of it."""
        self.inner.discard_step(output)
        self.watch.discarded(output)

    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.inner.has_requests()

    def has_work(self) -> bool:
        """Whether `schedule` could return a step now."""
        return self.inner.has_work()

    def num_requests(self) -> tuple[int, int]:
        """(running, waiting)."""
        return self.inner.num_requests()

    def requests(self) -> list[Request]:
        """Those that are not finished."""
        return self.inner.requests()

    def waiting_reason(self, request_id: str) -> str | None:
        """Why a request waits."""
        return self.inner.waiting_reason(request_id)

    def pause(self, state: PauseState) -> None:
        """Hold new requests, or all, or none."""
        self.inner.pause(state)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks; whether it worked."""
        return self.inner.reset_prefix_cache(preempt_running=preempt_running)

    def stats(self) -> SchedulerStats:
        """Counters and gauges."""
        return self.inner.stats()
