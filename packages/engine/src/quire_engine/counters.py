"""Statistics across engine processes: counters go on where a process that died left them, and engines add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from quire_interfaces import SchedulerStats

__all__ = ["add_counters", "sum_stats"]

_NAMES = [spec.name for spec in dataclasses.fields(SchedulerStats)]
_COUNTERS = [name for name in _NAMES if name.endswith("_total")]
_SHARES = [name for name in _NAMES if name.endswith("_usage")]


def add_counters(stats: SchedulerStats, former: SchedulerStats) -> SchedulerStats:
    """The gauges of `stats`, and the counters (`..._total`) of both together."""
    return dataclasses.replace(
        stats, **{name: _added(getattr(stats, name), getattr(former, name)) for name in _COUNTERS}
    )


def sum_stats(each_stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Statistics of several engines (at least one) as one: counts added, used shares averaged."""
    together: dict[str, Any] = {name: getattr(each_stats[0], name) for name in _NAMES}
    for stats in each_stats[1:]:
        together = {name: _added(together[name], getattr(stats, name)) for name in _NAMES}
    for name in _SHARES:
        together[name] /= len(each_stats)
    return SchedulerStats(**together)


def _added(mine: Any, other: Any) -> Any:
    if isinstance(mine, list):
        return [sum(pair) for pair in zip_longest(mine, other, fillvalue=0)]
    if isinstance(mine, dict):
        return {key: mine.get(key, 0) + other.get(key, 0) for key in {**other, **mine}}
    return mine + other
