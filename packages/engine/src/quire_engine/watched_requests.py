"""`RequestRecords`: what becomes of each request while an engine is watched. Hears of rows and chunks; plans none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire_interfaces import Request, RequestStatus
from quire_interfaces.engine_watch import FIRST_NUMBER, PromptChunk, RequestRecord, RowRecord

__all__ = ["RequestRecords", "RequestTrace", "new_record"]

MAX_FINISHED = 1024
"""Finished requests that wait to be told."""
MAX_CHUNKS = 64
"""Chunks kept of one request."""
MAX_ROWS = 512
"""Rows of a report; the running ones come first."""
MAX_ASKED = 32
"""Waiting requests that are asked for their reason in a report."""


@dataclass(slots=True, eq=False)
class RequestTrace:
    """A request that is watched. Written here and by `EngineWatch`."""

    request: Request
    record: RequestRecord
    revision: int
    """Number of the last change that reports tell."""
    block_ids: list[int] = field(default_factory=list)
    """All that it holds, of all groups."""
    num_computed: int = 0
    """Known tokens that are computed, while `num_to_compute` is more."""
    num_to_compute: int = 0
    """Known tokens when it entered its row."""
    has_drafts: bool = False
    """Whether a step since the last report had draft tokens."""

    @property
    def phase(self) -> str:
        """As `RowRecord.phase`."""
        if self.request.status == RequestStatus.RUNNING:
            if self.num_computed < self.num_to_compute:
                return "prefill"
            return "draft" if self.has_drafts else "decode"
        return "preempted" if self.request.status == RequestStatus.PREEMPTED else "waiting"

    def row(self) -> RowRecord:
        """Where it stands."""
        request = self.request
        is_prefill = self.num_computed < self.num_to_compute
        num_computed = self.num_computed if is_prefill else request.num_tokens
        is_waiting = request.status != RequestStatus.RUNNING
        return RowRecord(
            self.record.number,
            self.phase,
            0 if is_waiting else num_computed,
            len(request.output_token_ids),
            len(self.block_ids),
        )


def new_record(request: Request, number: int, now_s: float, *, is_complete: bool) -> RequestRecord:
    """What is known of a request when it comes, or later, when somebody begins to look."""
    return RequestRecord(
        number=number,
        request_id=request.request_id,
        client_request_id=request.options.client_request_id,
        tenant=request.options.tenant,
        num_prompt_tokens=len(request.encoder_token_ids) or request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        queued_s=now_s if is_complete else min(request.arrival_time_s or now_s, now_s),
        is_complete=is_complete,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        num_external_tokens=request.num_external_tokens,
        num_output_tokens=len(request.output_token_ids),
    )


class RequestRecords:
    """Records of the requests that are not finished, and of the last ones that are.

    Args:
        waiting_reason: Why a request waits, by its id; None where it does not.
    """

    def __init__(self, waiting_reason: Callable[[str], str | None]) -> None:
        self._waiting_reason = waiting_reason
        self.traces: dict[str, RequestTrace] = {}
        """By id, those that are not finished."""
        self._finished: deque[tuple[int, RequestRecord]] = deque(maxlen=MAX_FINISHED)
        self.num_changes = 0
        self._next_number = FIRST_NUMBER
        self._asked_s = 0.0

    def add(self, request: Request, now_s: float, *, is_complete: bool) -> RequestTrace:
        """A request has come, or was there already."""
        record = new_record(request, self._next_number, now_s, is_complete=is_complete)
        self._next_number += 1
        trace = self.traces[request.request_id] = RequestTrace(request, record, 0)
        self.changed(trace)
        return trace

    def changed(self, trace: RequestTrace) -> None:
        """Tell of the record with the next report."""
        self.num_changes += 1
        trace.revision = self.num_changes

    def entered_row(self, trace: RequestTrace, now_s: float, num_cached_tokens: int, num_known_tokens: int) -> None:
        """It was put into a row, for the first time or again."""
        record = trace.record
        trace.num_computed, trace.num_to_compute = num_cached_tokens, num_known_tokens
        record.wait_reason = None
        if not record.scheduled_s:
            record.scheduled_s = now_s
            record.num_cached_tokens = num_cached_tokens
            record.num_external_tokens = trace.request.num_external_tokens
        else:
            record.resumed_s.append(now_s)
        self.changed(trace)

    def add_chunk(self, trace: RequestTrace, planned_s: float, start: int, num_tokens: int) -> None:
        """A step computes known tokens of it."""
        record = trace.record
        record.num_chunks += 1
        if len(record.chunks) < MAX_CHUNKS:
            record.chunks.append(PromptChunk(planned_s, start, num_tokens))
        trace.num_computed = start + num_tokens
        self.changed(trace)

    def preempted(self, trace: RequestTrace, now_s: float) -> None:
        """It lost its row, and waits."""
        trace.record.preempted_s.append(now_s)
        self.changed(trace)

    def finish(self, trace: RequestTrace, now_s: float) -> None:
        """It has ended. Only the first call counts."""
        request, record = trace.request, trace.record
        if self.traces.get(request.request_id) is not trace:
            return
        del self.traces[request.request_id]
        record.finished_s = now_s
        record.finish_reason = None if request.finish_reason is None else str(request.finish_reason)
        record.num_output_tokens = len(request.output_token_ids)
        record.wait_reason = None
        self.num_changes += 1
        self._finished.append((self.num_changes, record))

    def look(self, now_s: float) -> dict[str, int]:
        """Notice who has ended, and ask some of those that wait for what. Returns reason -> how many."""
        elapsed_s = now_s - self._asked_s if self._asked_s else 0.0
        self._asked_s = now_s
        reasons: dict[str, int] = {}
        num_asked = 0
        for trace in list(self.traces.values()):
            if trace.request.is_finished:
                self.finish(trace, now_s)
                continue
            trace.record.num_output_tokens = len(trace.request.output_token_ids)
            if trace.request.status == RequestStatus.RUNNING or num_asked >= MAX_ASKED:
                continue
            num_asked += 1
            reason = self._waiting_reason(trace.request.request_id) or "capacity"
            reasons[reason] = reasons.get(reason, 0) + 1
            waited_s = min(elapsed_s, now_s - trace.record.queued_s)
            trace.record.waits_s[reason] = trace.record.waits_s.get(reason, 0.0) + waited_s
            if trace.record.wait_reason != reason:
                trace.record.wait_reason = reason
                self.changed(trace)
        return reasons

    def since(self, number: int) -> list[RequestRecord]:
        """Records with changes after this number, in the order of their last change."""
        changed: list[tuple[int, RequestRecord]] = [each for each in self._finished if each[0] > number]
        changed += [(trace.revision, trace.record) for trace in self.traces.values() if trace.revision > number]
        return [record for _, record in sorted(changed, key=lambda each: each[0])]

    def alive(self) -> list[RequestRecord]:
        """Records of those that are not finished."""
        return [trace.record for trace in self.traces.values()]

    def rows(self) -> list[RowRecord]:
        """Where those stand that are not finished, the running ones first."""
        traces: Iterable[RequestTrace] = sorted(
            self.traces.values(), key=lambda trace: trace.request.status != RequestStatus.RUNNING
        )
        rows = []
        for trace in list(traces)[:MAX_ROWS]:
            rows.append(trace.row())
            trace.has_drafts = False
        return rows
