"""Ranks in processes of their own: every step runs on all of them, and none is waited for once it is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed_counting_worker import CountingWorker

import quire_distributed.executor
from quire_distributed import SharedMemoryCollectives, SharedMemoryRendezvous
from quire_distributed.executor import MultiprocExecutor, RankProcess, start_ranks
from quire_interfaces import EngineDeadError, RankDeadError
from quire_interfaces.step import SchedulerOutput

Make = Callable[..., tuple[MultiprocExecutor, list[RankProcess]]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[MultiprocExecutor] = []

    def make(size: int = 2, payload: Any = 1) -> tuple[MultiprocExecutor, list[RankProcess]]:
        with SharedMemoryRendezvous(size) as rendezvous:
            ranks = start_ranks(size, "distributed_counting_worker:build", [payload] * (size - 1), rendezvous.fd)
            collectives = SharedMemoryCollectives(rendezvous.address, 0, size)
        try:
            for rank in ranks:
                rank.wait_until_ready()
        except BaseException:
            for rank in ranks:
                rank.close()
            collectives.close()
            raise
        executor = MultiprocExecutor(CountingWorker(1, collectives), ranks, collectives)
        made.append(executor)
        return executor, ranks

    yield make
    for executor in made:
        executor.close()


def step(step_id: int, request_id: str = "") -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        rows=[0],
        request_ids=[request_id],
        num_computed_tokens=[0],
        num_scheduled_tokens=[1],
        samples=[True],
    )


def test_every_rank_runs_every_step(make: Make) -> None:
    executor, ranks = make(size=3)
    for step_id in (1, 2, 3):
        assert executor.execute(step(step_id)).result().sampled_token_ids == [[6 * step_id]]
    executor.call("set_factor", 10)
    assert executor.execute(step(4)).result().sampled_token_ids == [[4 + 5 * 40]]
    first, second = executor.ask("rank_times", 10), executor.ask("rank_times", 7)
    assert second() == [7, 14]
    assert first() == [10, 20]
    with pytest.raises(RuntimeError, match="rank 1: ValueError: a call that fails"):
        executor.ask("fail")()
    executor.close()
    assert not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks)


def test_a_step_that_fails_on_all_ranks_is_only_that(make: Make) -> None:
    executor, _ = make()
    for step_id in range(1, 12):
        with pytest.raises(ValueError, match="a step that fails"):
            executor.execute(step(step_id, "fails on all")).result()
    assert executor.execute(step(12)).result().sampled_token_ids == [[36]]


def test_a_step_that_fails_on_one_rank_ends_the_engine(make: Make) -> None:
    executor, _ = make()
    with pytest.raises(EngineDeadError, match="a step that fails there"):
        executor.execute(step(1, "fails on one")).result()


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_is_killed_ends_the_engine_within_a_second(make: Make, waits: bool) -> None:
    executor, (rank,) = make()
    executor.execute(step(1)).result()
    if waits:  # rank 0 is in a collective that the other never joins
        os.kill(rank.pid, signal.SIGSTOP)
    threading.Timer(0.2 if waits else 0.0, os.kill, (rank.pid, signal.SIGKILL)).start()
    if not waits:
        rank.wait_for_end()
    failure = executor.execute(step(2)).exception()
    assert isinstance(failure, RankDeadError)
    assert "was ended by SIGKILL" in str(failure)
    with pytest.raises(RankDeadError, match="was ended by SIGKILL"):
        executor.ask("rank_times", 1)()


def test_a_result_does_not_count_where_a_rank_was_gone_by_then(make: Make) -> None:
    executor, _ = make()
    failure = executor.execute(step(1, "a rank goes")).exception()
    assert isinstance(failure, RankDeadError)
    assert "its device failed" in str(failure)


def test_a_step_that_does_not_end_when_a_rank_is_gone_ends_the_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quire_distributed.executor, "STUCK_S", 0.1)
    executor, (rank,) = make()
    failures: list[RankDeadError] = []
    runner: Any = executor._runner

    def end(failure: RankDeadError) -> None:
        failures.append(failure)
        runner.ends.set()

    executor.on_idle_failure = end
    threading.Timer(0.3, os.kill, (rank.pid, signal.SIGKILL)).start()
    executor.execute(step(1, "does not end"))
    assert runner.ends.is_set()
    assert "was ended by SIGKILL" in str(failures[0])


def test_a_rank_that_cannot_start_says_why(make: Make) -> None:
    with pytest.raises(RankDeadError, match="there is nothing to build"):
        make(payload=None)
