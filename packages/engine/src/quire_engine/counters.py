"""Statistics across engine processes: counters go on where a process that died left them."""

from __future__ import annotations

import dataclasses

from quire_interfaces import SchedulerStats, sum_stats

__all__ = ["add_counters"]

_GAUGES = [spec.name for spec in dataclasses.fields(SchedulerStats) if not spec.name.endswith("_total")]


def add_counters(stats: SchedulerStats, former: SchedulerStats) -> SchedulerStats:
    """The gauges of `stats`, and the counters (`..._total`) of both together."""
    return dataclasses.replace(sum_stats([stats, former]), **{name: getattr(stats, name) for name in _GAUGES})
