"""Schedules are those that were recorded: who is in which step, with which blocks, and what clients were told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scheduler_traces import SCENARIOS, Scenario, Trace

GOLDEN = json.loads(Path(__file__).with_name("golden_schedules.json").read_text())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_schedules_are_as_recorded(scenario: Scenario) -> None:
    digests = Trace(scenario).run()
    expected = GOLDEN[scenario.name]
    differing = next((i for i, pair in enumerate(zip(digests, expected, strict=False)) if pair[0] != pair[1]), None)
    assert differing is None, f"the run differs from event {differing * 40} on"
    assert len(digests) == len(expected)
