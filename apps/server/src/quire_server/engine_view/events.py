"""What a caller is shown of an engine: everything of its own requests, and of others' that they are there.

No event has text or tokens. Of another tenant's request neither its ids nor what its prefix shares are told.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quire_interfaces.engine_watch import RequestRecord, WatchReport
from quire_observability.request_explanation import HIDDEN_MISS
from quire_server.engine_view.watcher import EngineNews

__all__ = ["Viewer", "event_of"]


class Viewer(NamedTuple):
    """Who looks."""

    tenant: str | None
    """Whose requests are its own; None for everybody's."""
    hides_salts: bool
    """Whether that others have cached the same tokens is none of its business."""

    def sees(self, record: RequestRecord) -> bool:
        """Whether a request is its own."""
        return self.tenant is None or (record.tenant or "") == self.tenant


def event_of(news: EngineNews, viewer: Viewer) -> dict[str, Any]:
    """An event in plain types; times are Unix times in seconds, other fields those of `WatchReport`."""
    report = news.report
    if report is None:
        return {"engine": news.rank, "state": "down"}
    offset_s = news.clock_offset_s
    event: dict[str, Any] = {
        "engine": news.rank,
        "state": "up",
        "anew": report.is_anew,
        "time": report.now_s + offset_s,
        "num_blocks": report.num_blocks,
        "block_size": report.block_size,
        "steps": [_step(report, index, offset_s) for index in range(len(report.steps))],
        "requests": [_request(record, viewer, offset_s) for record in report.requests],
        "rows": [list(row) for row in report.rows],
        "waiting_reasons": report.waiting_reasons,
        "totals": report.totals,
        "watch_share": report.watch_share,
        "num_restarts": report.num_restarts,
    }
    if report.is_anew:
        event["holders"] = report.holders
    else:
        event["changes"] = [list(each) for each in report.changes]
    return event


def _step(report: WatchReport, index: int, offset_s: float) -> list[float]:
    """The fields of a `StepRecord`, with its duration in the place of its end."""
    number, planned_s, done_s, *rest = report.steps[index]
    return [number, planned_s + offset_s, done_s - planned_s, *rest]


def _request(record: RequestRecord, viewer: Viewer, offset_s: float) -> dict[str, Any]:
    def at(time_s: float) -> float | None:
        return time_s + offset_s if time_s else None

    told: dict[str, Any] = {
        "number": record.number,
        "is_own": viewer.sees(record),
        "queued_at": at(record.queued_s),
        "scheduled_at": at(record.scheduled_s),
        "first_token_at": at(record.first_token_s),
        "finished_at": at(record.finished_s),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "max_tokens": record.max_tokens,
        "num_preemptions": len(record.preempted_s),
        "wait_reason": record.wait_reason,
        "num_draft_tokens": record.num_draft_tokens,
        "num_accepted_tokens": record.num_accepted_tokens,
    }
    if not told["is_own"]:
        return told
    is_secret = viewer.hides_salts and record.miss_reason == "different_salt"
    return told | {
        "id": record.client_request_id or record.request_id,
        "engine_request_id": record.request_id,
        "tenant": record.tenant,
        "finish_reason": record.finish_reason,
        "num_cached_tokens": record.num_cached_tokens,
        "miss_reason": HIDDEN_MISS if is_secret else record.miss_reason,
        "num_chunks": record.num_chunks,
        "grammar_s": record.grammar_s,
    }
