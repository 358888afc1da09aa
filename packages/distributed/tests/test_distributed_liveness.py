"""What ranks learn of each other by datagrams."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from quire_distributed.liveness import Liveness, bind_datagrams
from quire_interfaces import RankDeadError

HOST = "127.0.0.1"


class Rank:
    """A rank that watches, and an event for whoever waits for the others."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], silence_s: float) -> None:
        self.woken = threading.Event()
        self.liveness = Liveness(rank, sockets, "token", silence_s, self.woken.set)

    def failure(self) -> tuple[int, str]:
        """Who is gone and why, once this rank knows."""
        assert self.woken.wait(30)
        with pytest.raises(RankDeadError) as caught:
            self.liveness.check()
        return caught.value.rank, caught.value.cause


class Ranks:
    """A group whose sockets are known, so that tests can send as a rank, or end one."""

    def __init__(self, size: int, silence_s: float) -> None:
        numbers = range(size)
        self.sockets = {(i, j): bind_datagrams(HOST) for i in numbers for j in numbers if i != j}
        self.ranks = [Rank(i, {j: self.sockets[i, j] for j in numbers if j != i}, silence_s=silence_s) for i in numbers]

    def address(self, of: int, toward: int) -> tuple[str, int]:
        name: tuple[str, int] = self.sockets[of, toward].getsockname()
        return name

    def start(self, *numbers: int) -> list[Rank]:
        others = range(len(self.ranks))
        for i in numbers:
            self.ranks[i].liveness.start({j: self.address(j, i) for j in others if j != i})
        return [self.ranks[i] for i in numbers]

    def close(self) -> None:
        for rank in self.ranks:
            rank.liveness.close()
        for each in self.sockets.values():
            each.close()


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    groups: list[Ranks] = []

    def make(size: int, silence_s: float = 60.0) -> Ranks:
        groups.append(Ranks(size, silence_s))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_a_report_reaches_every_rank(make_ranks: Callable[..., Ranks]) -> None:
    first, second, third = make_ranks(3).start(0, 1, 2)
    first.liveness.check()
    second.liveness.report(1, "no memory")
    second.liveness.report(0, "a second report")
    assert [each.failure() for each in (first, second, third)] == [(1, "no memory")] * 3


def test_a_rank_that_leaves_says_so(make_ranks: Callable[..., Ranks]) -> None:
    first, second = make_ranks(2).start(0, 1)
    second.liveness.close()
    assert first.failure() == (1, "it left the group")


def test_a_closed_socket_is_the_end_of_its_process(make_ranks: Callable[..., Ranks]) -> None:
    group = make_ranks(2)
    address = group.address(1, 0)
    group.sockets[1, 0].close()
    group.ranks[0].liveness.start({1: address})
    assert group.ranks[0].failure() == (1, "its process ended")


def test_whoever_says_nothing_is_gone(make_ranks: Callable[..., Ranks]) -> None:
    (first,) = make_ranks(2, silence_s=0.3).start(0)
    assert first.failure() == (1, "nothing was heard of it for 0.3 s")


def test_datagrams_of_others_do_not_count(make_ranks: Callable[..., Ranks]) -> None:
    group = make_ranks(2, silence_s=1.0)
    stop = threading.Event()

    def chatter() -> None:
        group.sockets[1, 0].connect(group.address(0, 1))
        while not stop.wait(0.05):
            for message in (b"no json", b"7", json.dumps(["other", [1, "a lie"]]).encode()):
                group.sockets[1, 0].send(message)

    thread = threading.Thread(target=chatter)
    thread.start()
    (first,) = group.start(0)
    assert first.failure() == (1, "nothing was heard of it for 1 s")
    stop.set()
    thread.join()


def test_a_failure_is_of_the_peer_unless_another_rank_is_known_to_be_gone(
    make_ranks: Callable[..., Ranks],
) -> None:
    first, second = make_ranks(2).start(0, 1)
    assert (str(first.liveness.failure_of(1, "the connection broke"))) == str(RankDeadError(1, "the connection broke"))
    assert second.failure() == (1, "the connection broke")
    assert second.liveness.failure_of(0, "another cause").cause == "the connection broke"
