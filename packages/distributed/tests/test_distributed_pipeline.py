"""Steps on their way through pipeline stages: their order, and what becomes of them when stages fail, die or hang.

The ranks are threads behind real channels, and run the loop that a rank's process runs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quire_distributed import Collectives, Mesh, thread_group
from quire_distributed.messages import Channel
from quire_distributed.pipeline_executor import PipelineExecutor
from quire_distributed.rank_handle import RankEnd, RankHandle
from quire_distributed.worker import serve
from quire_interfaces import KVTransferOutput, KVTransferPlan, RankDeadError
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput


class Stage:
    """Adds its rank to what the stage before gives; the last one samples the sum. What a step's request is called says
    what goes wrong, and where."""

    def __init__(self, group: Collectives) -> None:
        self.group = group
        self.sampled: list[tuple[int, list[int], list[list[int]]]] = []
        self.may_go = threading.Event()
        self.steps: list[int] = []

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        what, _, where = output.request_ids[0].partition(" on ")
        own, is_last = self.group.rank, self.group.rank + 1 == self.group.size
        is_here = where == "all" or where == str(own)
        self.steps.append(output.step_id)
        if what == "dies" and is_here:
            self.group.abort("it died")
            raise RankDeadError(own, "it died")
        if what == "hangs" and is_here:
            self.may_go.wait()
        total = torch.tensor([output.step_id])
        if own:
            total = self.group.recv(total, own - 1)
        has_failed = bool(total < 0) or (what == "fails" and is_here)
        total = torch.tensor([-1]) if has_failed else total + own
        if not is_last:
            self.group.send(total, own + 1)
        if has_failed or (what == "fails alone" and is_here):
            raise ValueError(f"stage {own} failed")
        transfers = KVTransferOutput(finished={5: [own != 1]}) if what == "loads" else None
        sampled = [[int(total)]] if is_last else []
        return ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=sampled, kv_transfer=transfers)

    def take_sampled(self, step_id: int, rows: Any, token_ids: Any) -> None:
        self.sampled.append((step_id, list(rows), list(token_ids)))

    def call(self, name: str, *arguments: Any) -> None:
        assert name == "take_sampled"
        self.take_sampled(*arguments)

    def close(self) -> None:
        self.group.close()


class ThreadHandle(RankHandle):
    """A rank in a thread."""

    def __init__(self, stage: Stage) -> None:
        own, theirs = socket.socketpair()
        super().__init__(stage.group.rank, Channel(own))
        self._stage, self._theirs = stage, Channel(theirs)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self._watcher.start()

    def _serve(self) -> None:
        try:
            self._theirs.send(("ready",))
            serve(self._stage, self._theirs)
        except (RankDeadError, EOFError, OSError):
            pass
        self._theirs.close()

    def _cause_of_end(self) -> RankEnd:
        return RankEnd("its thread ended")

    def close(self) -> None:
        self._is_closing = True
        self._stage.may_go.set()
        with contextlib.suppress(OSError):
            self._channel.send(("close",))
        self._thread.join()
        self._channel.close()
        self._watcher.join()


Make = Callable[..., tuple[PipelineExecutor, list[Stage]]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PipelineExecutor] = []

    def make(size: int = 3) -> tuple[PipelineExecutor, list[Stage]]:
        group = thread_group(size)
        stages = [Stage(each) for each in group]
        handles = [ThreadHandle(stage) for stage in stages[1:]]
        for handle in handles:
            handle.wait_until_ready()
        executor = PipelineExecutor(stages[0], handles, [group[0]], Mesh(pp=size))
        made.append(executor)
        return executor, stages

    yield make
    for executor in made:
        executor.close()


def step(step_id: int, request_id: str = "", **more: Any) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        rows=[0],
        request_ids=[request_id],
        num_computed_tokens=[0],
        num_scheduled_tokens=[1],
        samples=[True],
        **more,
    )


def test_several_steps_are_on_their_way_and_end_in_order(make: Make) -> None:
    executor, stages = make()
    futures = [executor.execute(step(number)) for number in (1, 2, 3)]
    assert [future.result(10).sampled_token_ids for future in futures] == [[[4]], [[5]], [[6]]]
    executor.execute(step(4)).result(10)
    told = [(1, [0], [[4]]), (2, [0], [[5]]), (3, [0], [[6]])]
    assert stages[0].sampled == told, "what was sampled is told before the next step"
    assert stages[1].sampled == told
    assert stages[2].sampled == [], "the last stage knows what it sampled"
    assert [stage.steps for stage in stages] == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_stage_that_dies_in_a_step_fails_all_steps_on_their_way(make: Make, where: int) -> None:
    executor, _ = make()
    futures = [executor.execute(step(1)), executor.execute(step(2, f"dies on {where}")), executor.execute(step(3))]
    for future in futures[1:]:
        assert isinstance(future.exception(10), RankDeadError)
    assert isinstance(executor.execute(step(4)).exception(10), RankDeadError), "the engine cannot go on"


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_step_that_fails_is_only_that(make: Make, where: int) -> None:
    executor, _ = make()
    futures = [executor.execute(step(number, f"fails on {where}" if number == 2 else "")) for number in (1, 2, 3)]
    assert futures[0].result(10).sampled_token_ids == [[4]]
    with pytest.raises(RuntimeError, match=f"stage {where} failed"):
        futures[1].result(10)
    assert futures[2].result(10).sampled_token_ids == [[6]]
    assert executor.execute(step(4)).result(10).sampled_token_ids == [[7]]


def test_a_stage_that_fails_where_the_last_one_goes_on_ends_the_engine(make: Make) -> None:
    executor, _ = make()
    assert isinstance(executor.execute(step(1, "fails alone on 1")).exception(10) or late(executor), RankDeadError)


def late(executor: PipelineExecutor) -> BaseException | None:
    """What the next steps get, once it is known."""
    deadline = time.monotonic() + 10
    number = 2
    while time.monotonic() < deadline:
        failure = executor.execute(step(number)).exception(10)
        if failure is not None:
            return failure
        number += 1
        time.sleep(0.05)
    return None


def test_a_stage_that_ends_while_nothing_runs_is_told(make: Make) -> None:
    executor, stages = make(2)
    is_told = threading.Event()
    executor.on_idle_failure = lambda failure: is_told.set()
    stages[1].group.abort("it left")
    executor._ranks[0]._theirs.close()
    assert is_told.wait(10)


def test_a_close_while_steps_are_on_their_way_ends_them(make: Make) -> None:
    executor, _ = make()
    futures = [executor.execute(step(1, "hangs on 2")), executor.execute(step(2)), executor.execute(step(3))]
    threading.Timer(0.1, executor.close).start()
    ends = [future.exception(10) for future in futures]
    assert all(end is None or isinstance(end, RankDeadError) for end in ends)
    executor.close()


def test_blocks_have_arrived_when_every_stage_says_so(make: Make) -> None:
    executor, _ = make()
    seen: list[list[Any]] = []

    def merge(output: SchedulerOutput, reports: list[KVTransferOutput | None]) -> KVTransferOutput | None:
        seen.append([None if report is None else report.finished for report in reports])
        return reports[1]

    executor.merge_transfers = merge
    result = executor.execute(step(1, "loads", kv_transfer=KVTransferPlan(waits=True))).result(10)
    assert seen == [[{5: [True]}, {5: [False]}, {5: [True]}]]
    assert result.kv_transfer == KVTransferOutput(finished={5: [False]})
