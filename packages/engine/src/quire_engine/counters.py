"""Statistics across engine processes: counters go on where a process that died left them."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from typing import Any

from quire_interfaces import SchedulerStats

__all__ = ["add_counters"]

_COUNTERS = [spec.name for spec in dataclasses.fields(SchedulerStats) if spec.name.endswith("_total")]


def add_counters(stats: SchedulerStats, former: SchedulerStats) -> SchedulerStats:
    """The gauges of `stats`, and the counters (`..._total`) of both together."""
    together: dict[str, Any] = {}
    for name in _COUNTERS:
        mine, other = getattr(stats, name), getattr(former, name)
        if isinstance(mine, list):
            together[name] = [sum(pair) for pair in zip_longest(mine, other, fillvalue=0)]
        elif isinstance(mine, dict):
            together[name] = {key: mine.get(key, 0) + other.get(key, 0) for key in {**other, **mine}}
        else:
            together[name] = mine + other
    return dataclasses.replace(stats, **together)
