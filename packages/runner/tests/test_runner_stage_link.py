"""The link between pipeline stages: what comes is what was sent, of the same step, or the stages do not go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_distributed import Collectives, run_thread_ranks
from quire_interfaces import RankDeadError
from quire_interfaces.step import RequestFailure, SchedulerOutput
from quire_runner.stage_link import StageFailedError, StageLink

WIDTH = 4
FAILURE = RequestFailure("its adapter is gone")


def step(step_id: int, *num_tokens: int) -> SchedulerOutput:
    """A step with so many tokens of rows 0, 1, ..."""
    rows = list(range(len(num_tokens)))
    return SchedulerOutput(
        step_id=step_id,
        rows=rows,
        request_ids=list(map(str, rows)),
        num_computed_tokens=[0] * len(rows),
        num_scheduled_tokens=list(num_tokens),
        samples=[True] * len(rows),
    )


def hidden(num_tokens: int, start: float = 0.0) -> Tensor:
    return torch.arange(num_tokens * WIDTH, dtype=torch.float32).view(-1, WIDTH) + start


LIKE = torch.empty(0, WIDTH)


def stages(*functions: Callable[[StageLink], object]) -> list[object]:
    """Run each function as a stage, and return what they return."""
    return run_thread_ranks(len(functions), lambda group: functions[group.rank](StageLink(group)))


def test_each_step_hands_on_what_the_stage_before_made() -> None:
    def first(link: StageLink) -> None:
        assert not link.is_last
        for number in (1, 2, 3):
            assert link.begin(step(number, 2, number)) == {}
            link.send(hidden(2 + number, number))
            link.end(LIKE)
            assert link.is_sent

    def middle(link: StageLink) -> None:
        for number in (1, 2, 3):
            link.begin(step(number, 2, number))
            link.send(link.receive(hidden(2 + number)) * 2)
            link.end(LIKE)

    def last(link: StageLink) -> list[Tensor]:
        assert link.is_last
        found = []
        for number in (1, 2, 3):
            link.begin(step(number, 2, number))
            found.append(link.receive(hidden(2 + number)))
            link.end(LIKE)
        return found

    found = stages(first, middle, last)[2]
    assert isinstance(found, list)
    for number, each in enumerate(found, 1):
        assert torch.equal(each, hidden(2 + number, number) * 2)


def test_rows_that_a_stage_leaves_out_are_left_out_behind_it() -> None:
    """Stage 0 leaves row 1 out, stage 1 row 0: one token of row 2 is left."""

    def first(link: StageLink) -> None:
        link.begin(step(1, 2, 3, 1))
        link.drop({1: FAILURE})
        link.send(hidden(3))
        link.end(LIKE)

    def middle(link: StageLink) -> None:
        assert link.begin(step(1, 2, 3, 1)) == {1: FAILURE}
        link.drop({0: FAILURE})
        own = link.receive(hidden(1))
        assert torch.equal(own, hidden(3)[2:])
        link.send(own)
        link.end(LIKE)

    def last(link: StageLink) -> Tensor:
        assert link.begin(step(1, 2, 3, 1)) == {1: FAILURE, 0: FAILURE}
        return link.receive(hidden(1))

    found = stages(first, middle, last)[2]
    assert isinstance(found, Tensor)
    assert torch.equal(found, hidden(3)[2:])


def test_a_step_that_fails_fails_behind_it_and_the_next_one_goes_on() -> None:
    """Also where the tensor of the step had been sent already, and nobody has read it."""

    def first(link: StageLink) -> None:
        link.begin(step(1, 2))
        link.fail("no memory", LIKE)
        for number in (2, 3):
            link.begin(step(number, 2))
            link.send(hidden(2, number))
            link.end(LIKE)

    def middle(link: StageLink) -> None:
        with pytest.raises(StageFailedError, match="no memory"):
            link.begin(step(1, 2))
        link.fail("no memory", LIKE)
        link.begin(step(2, 2))
        link.fail("no luck", LIKE)  # before it has received
        link.begin(step(3, 2))
        link.send(link.receive(hidden(2)))
        link.end(LIKE)

    def last(link: StageLink) -> Tensor:
        for why in ("no memory", "no luck"):
            number = 1 if why == "no memory" else 2
            with pytest.raises(StageFailedError, match=why):
                link.begin(step(number, 2))
            link.fail(why, LIKE)
        link.begin(step(3, 2))
        return link.receive(hidden(2))

    found = stages(first, middle, last)[2]
    assert isinstance(found, Tensor)
    assert torch.equal(found, hidden(2, 3))


def test_a_step_without_rows_passes() -> None:
    def first(link: StageLink) -> None:
        link.begin(step(1, 2))
        link.drop({0: FAILURE})
        link.end(LIKE)
        link.begin(step(2))
        link.end(LIKE)

    def last(link: StageLink) -> list[object]:
        found = [link.begin(step(1, 2))]
        link.end(LIKE)
        found.append(link.begin(step(2)))
        link.end(LIKE)
        return list(found)

    assert stages(first, last)[1] == [{0: FAILURE}, {}]


@pytest.mark.parametrize(
    ("header", "notes", "cause"),
    [
        ((7, 1, 0, 0), b"", "it computed step 7 where stage 1 has 1"),
        ((1, 5, 0, 0), b"", "makes no sense"),
        ((1, -1, 0, 0), b"", "makes no sense"),
        ((1, 1, 2, 0), b"", "makes no sense"),
        ((1, 1, 0, -8), b"", "makes no sense"),
        ((1, 1, 0, 3), b"[[0", "cannot be read"),
    ],
)
def test_messages_of_another_step_or_without_sense_end_the_stages(
    header: tuple[int, ...], notes: bytes, cause: str
) -> None:
    def run(group: Collectives) -> str:
        if group.rank == 0:
            group.send(torch.tensor(header), 1)
            if notes:
                group.send(torch.frombuffer(bytearray(notes), dtype=torch.uint8), 1)
            return ""
        with pytest.raises(RankDeadError, match=cause) as failure:
            StageLink(group).begin(step(1, 2))
        assert failure.value.rank == 0
        return "seen"

    assert run_thread_ranks(2, run) == ["", "seen"]


def test_a_message_that_is_late_is_waited_for() -> None:
    is_begun = threading.Event()

    def first(link: StageLink) -> None:
        link.begin(step(1, 2))
        is_begun.wait()
        time.sleep(0.05)
        link.send(hidden(2))
        link.end(LIKE)

    def last(link: StageLink) -> Tensor:
        is_begun.set()
        link.begin(step(1, 2))
        return link.receive(hidden(2))

    found = stages(first, last)[1]
    assert isinstance(found, Tensor)
    assert torch.equal(found, hidden(2))


def test_a_stage_that_ends_between_header_and_tensor_is_noticed() -> None:
    def run(group: Collectives) -> str:
        link = StageLink(group)
        if group.rank == 0:
            group.send(torch.tensor([1, 2, 0, 0]), 1)
            group.abort("it ran out of memory")
            return ""
        link.begin(step(1, 2))
        with pytest.raises(RankDeadError, match="it ran out of memory"):
            link.receive(hidden(2))
        return "seen"

    assert run_thread_ranks(2, run) == ["", "seen"]
