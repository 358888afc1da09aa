"""Counters of every shape go on where another process left them; gauges do not."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.counters import add_counters
from quire_interfaces import SchedulerStats, sum_stats


def test_every_counter_is_added() -> None:
    stats, former = SchedulerStats(), SchedulerStats()
    for spec in dataclasses.fields(SchedulerStats):
        value = getattr(stats, spec.name)
        if isinstance(value, dict):
            setattr(stats, spec.name, {"a": 1, "b": 2})
            setattr(former, spec.name, {"b": 3, "c": 4})
        elif isinstance(value, list):
            setattr(stats, spec.name, [1, 2])
            setattr(former, spec.name, [3])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(stats, spec.name, 5)
            setattr(former, spec.name, 6)
    added = add_counters(stats, former)
    for spec in dataclasses.fields(SchedulerStats):
        mine, sum_ = getattr(stats, spec.name), getattr(added, spec.name)
        if not spec.name.endswith("_total"):
            assert sum_ == mine, spec.name
        elif isinstance(mine, dict):
            assert sum_ == {"a": 1, "b": 5, "c": 4}, spec.name
        elif isinstance(mine, list):
            assert sum_ == [4, 2], spec.name
        else:
            assert sum_ == 11, spec.name


def test_engines_add_up_and_shares_are_averaged() -> None:
    one = SchedulerStats(num_running=1, kv_cache_usage=0.5, num_prompt_tokens_total=3, jit_compilations_total={"a": 1})
    other = SchedulerStats(num_running=2, kv_cache_usage=0.1, num_accepted_tokens_per_pos_total=[4])
    together = sum_stats([one, other])
    assert together.num_running == 3
    assert together.kv_cache_usage == pytest.approx(0.3)
    assert together.num_prompt_tokens_total == 3
    assert together.jit_compilations_total == {"a": 1}
    assert together.num_accepted_tokens_per_pos_total == [4]
    assert sum_stats([one]) == one
