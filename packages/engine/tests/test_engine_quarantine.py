"""The books of the quarantine: who is suspected, in which group, and until when."""

from __future__ import annotations

from quire_engine.quarantine import Quarantine
from quire_interfaces import SchedulerOutput


def step(**tokens: tuple[int, int]) -> SchedulerOutput:
    """A step of these requests: id -> (tokens computed before it, tokens in it)."""
    return SchedulerOutput(
        step_id=1,
        request_ids=list(tokens),
        rows=list(range(len(tokens))),
        num_computed_tokens=[before for before, _ in tokens.values()],
        num_scheduled_tokens=[count for _, count in tokens.values()],
        samples=[True] * len(tokens),
    )


def test_all_requests_of_a_failed_step_are_suspects_in_two_groups() -> None:
    quarantine = Quarantine()
    assert quarantine.step_failed(step(a=(0, 4), b=(0, 4), c=(0, 4), d=(0, 4), e=(0, 4))) is None
    assert quarantine.suspects == {"a", "b", "c", "d", "e"}
    assert quarantine.group == {"a", "b"}
    quarantine.step_succeeded(step(a=(0, 4), b=(0, 4)))
    assert quarantine.group == {"c", "d", "e"}
    assert quarantine.step_failed(step(c=(0, 4), d=(0, 4), e=(0, 4))) is None
    assert quarantine.step_failed(step(c=(0, 4))) == "c"
    assert quarantine.suspects == {"d", "e"}


def test_a_suspect_is_cleared_only_where_the_failed_step_had_brought_it() -> None:
    quarantine = Quarantine()
    quarantine.step_failed(step(a=(8, 4), b=(0, 4)))
    quarantine.step_succeeded(step(a=(8, 3)))
    assert "a" in quarantine.suspects
    quarantine.step_failed(
        step(a=(0, 6), b=(0, 4))
    )  # computed anew, and failed earlier: it has to come to 12 all the same
    quarantine.step_succeeded(step(a=(0, 6)))
    assert "a" in quarantine.suspects
    quarantine.step_succeeded(step(a=(6, 6)))
    assert quarantine.suspects == {"b"}


def test_who_is_gone_is_in_no_group() -> None:
    quarantine = Quarantine()
    quarantine.step_failed(step(a=(0, 1), b=(0, 1), c=(0, 1)))
    quarantine.clear(["a", "stranger"])
    assert quarantine.group == {"b", "c"}
    quarantine.clear(["b", "c"])
    assert not quarantine
    assert not quarantine.suspects
