"""Ranks of torch.distributed that are processes, over loopback: equal results, and what is seen of a killed one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from quire_distributed import Collectives, Mesh, SingleRank, TorchRendezvous, run_thread_ranks, subgroup
from quire_interfaces import ConfigError, RankDeadError

RANK = """
import os, sys, torch
from quire_distributed import Mesh, TorchRendezvous
from quire_interfaces import RankDeadError
port, mesh = int(sys.argv[1]), Mesh(tp=int(sys.argv[3]), rank=int(sys.argv[2]))
each = TorchRendezvous("127.0.0.1", port, mesh.rank, mesh.world_size).group("tp", mesh.group("tp"))
try:
    while True:
        x = each.broadcast(torch.empty(3, 20_000))
        each.all_reduce(x * each.rank)
        each.all_gather(x + each.rank, dim=0)
        each.send(x + each.rank, 0)
except RankDeadError as error:
    os._exit(100 + error.rank)  # as `run_rank`: torch's destructors may wait for ranks that are gone
"""
"""A rank that does as rank 0 says, and whose exit status tells which rank it missed."""

Start = Callable[[int], Collectives]


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.fixture
def start(children: list[subprocess.Popen[bytes]]) -> Iterator[Start]:
    """Makes a group: rank 0 here, the others in processes."""
    groups: list[Collectives] = []

    def start(size: int) -> Collectives:
        port, mesh = free_port(), Mesh(tp=size)
        for rank in range(1, size):
            arguments = [sys.executable, "-c", RANK, str(port), str(rank), str(size)]
            children.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))
        groups.append(TorchRendezvous("127.0.0.1", port, 0, size).group("tp", mesh.group("tp")))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def round_of(group: Collectives) -> None:
    x = torch.randn(3, 20_000)
    assert torch.equal(group.broadcast(x), x)
    assert torch.equal(group.all_reduce(x * 0), sum((x * rank for rank in range(1, group.size)), x * 0))
    assert torch.equal(group.all_gather(x, dim=0), torch.cat([x + rank for rank in range(group.size)]))
    for rank in range(1, group.size):
        assert torch.equal(group.recv(x, rank), x + rank)


def rounds_without_end(group: Collectives) -> None:
    while True:
        round_of(group)


def test_processes_give_the_bits_of_torch(start: Start) -> None:
    group = start(2)
    for _ in range(20):
        round_of(group)


def test_a_killed_process_is_named_to_every_rank(start: Start, children: list[subprocess.Popen[bytes]]) -> None:
    group = start(3)
    round_of(group)
    children[1].send_signal(signal.SIGKILL)
    with pytest.raises(RankDeadError, match="rank 2 is gone: ") as caught:
        rounds_without_end(group)
    assert caught.value.rank == 2
    assert children[0].wait(timeout=200) == 102, "the other rank waits on"
    with pytest.raises(RankDeadError, match="rank 2"):
        group.isend(torch.zeros(1), 1)


def test_a_stopped_process_falls_silent(start: Start, children: list[subprocess.Popen[bytes]]) -> None:
    group = start(2)
    round_of(group)
    group._liveness._silence_s = 1.0  # type: ignore[attr-defined]
    children[0].send_signal(signal.SIGSTOP)
    with pytest.raises(RankDeadError, match="rank 1 is gone: nothing was heard of it for 1 s"):
        rounds_without_end(group)


def test_nobody_comes() -> None:
    with pytest.raises(ConfigError, match="rank 0 of 2 cannot meet the others at 127"):
        TorchRendezvous("127.0.0.1", free_port(), 0, 2, timeout_s=0.2)


def test_a_group_of_one_needs_nobody() -> None:
    rendezvous = TorchRendezvous("127.0.0.1", free_port(), 0, 1)
    assert isinstance(rendezvous.group("tp", (0,)), SingleRank)
    with pytest.raises(ValueError, match="rank 0 is none of the group's"):
        rendezvous.group("pp", (1, 2))


def test_some_ranks_have_groups_of_their_own() -> None:
    port = free_port()

    def run(thread: Collectives) -> list[list[int]]:
        mesh = Mesh(tp=2, pp=2, rank=thread.rank)
        world = TorchRendezvous("127.0.0.1", port, mesh.rank, 4).group("ranks", range(4))
        groups = [world, subgroup(world, mesh.group("tp")), subgroup(world, mesh.group("pp"))]
        try:
            return [group.all_gather(torch.tensor([mesh.rank]), dim=0).tolist() for group in groups]
        finally:
            thread.barrier()
            for group in groups:
                group.close()

    everyone = [0, 1, 2, 3]
    assert run_thread_ranks(4, run) == [
        [everyone, [0, 1], [0, 2]],
        [everyone, [0, 1], [1, 3]],
        [everyone, [2, 3], [0, 2]],
        [everyone, [2, 3], [1, 3]],
    ]
