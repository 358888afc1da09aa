"""Reports of a watched engine on their way to who looks: decoded, and with what the client alone knows."""

from __future__ import annotations

import msgspec

from quire_interfaces import SchedulerStats
from quire_interfaces.engine_watch import RequestRecord, WatchReport

__all__ = ["read_record", "read_report"]

_TOTALS = (
    "num_prompt_tokens_total",
    "num_generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_query_tokens_total",
    "prefix_cache_hit_tokens_total",
    "num_draft_tokens_total",
    "num_accepted_tokens_total",
)

_reports = msgspec.msgpack.Decoder(WatchReport)
_records: msgspec.msgpack.Decoder[RequestRecord | None] = msgspec.msgpack.Decoder(RequestRecord | None)


def read_report(data: bytes, stats: SchedulerStats, num_restarts: int) -> WatchReport:
    """A report of a core.

    Args:
        data: As the core sent it.
        stats: The engine's latest statistics, with those of former processes.
        num_restarts: Number of processes of the engine that ended.
    """
    report = _reports.decode(data)
    report.totals = {name: getattr(stats, name) for name in _TOTALS}
    report.num_restarts = num_restarts
    return report


def read_record(data: bytes) -> RequestRecord | None:
    """A record of a core."""
    return _records.decode(data)
