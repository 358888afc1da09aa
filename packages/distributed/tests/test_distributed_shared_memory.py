"""Ranks that are processes: equal results, and what the others see when one is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire_distributed import SharedMemoryCollectives, SharedMemoryRendezvous
from quire_interfaces import ConfigError, RankDeadError

RANK = """
import sys, torch
from quire_distributed import SharedMemoryCollectives
address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
each = SharedMemoryCollectives(address, rank, size)
while True:
    x = each.broadcast(torch.empty(3, 5000))
    each.all_reduce(x * rank)
    each.all_gather(x + rank, dim=0)
    each.send(x + rank, 0)
"""
"""A rank that does as rank 0 says."""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()


def start(children: list[subprocess.Popen[bytes]], size: int) -> SharedMemoryCollectives:
    """Rank 0 here, the others in processes."""
    with SharedMemoryRendezvous(size, slice_bytes=1 << 14, channel_bytes=1 << 14) as rendezvous:
        for rank in range(1, size):
            arguments = [sys.executable, "-c", RANK, rendezvous.address, str(rank), str(size)]
            children.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))
        return SharedMemoryCollectives(rendezvous.address, 0, size)


def round_of(group: SharedMemoryCollectives) -> None:
    x = torch.randn(3, 5000)
    assert torch.equal(group.broadcast(x), x)
    assert torch.equal(group.all_reduce(x * 0), sum((x * rank for rank in range(1, group.size)), x * 0))
    assert torch.equal(group.all_gather(x, dim=0), torch.cat([x + rank for rank in range(group.size)]))
    for rank in range(1, group.size):
        assert torch.equal(group.recv(x, rank), x + rank)


def rounds_without_end(group: SharedMemoryCollectives) -> None:
    while True:
        round_of(group)


def memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_processes_give_the_bits_of_torch(children: list[subprocess.Popen[bytes]]) -> None:
    before = memory_files()
    group = start(children, 3)
    for _ in range(20):
        round_of(group)
    assert memory_files() <= before, "the memory has a name"


def test_a_killed_process_is_named_and_ends_every_rank(children: list[subprocess.Popen[bytes]]) -> None:
    group = start(children, 3)
    round_of(group)
    killed = random.Random(time.time_ns()).randrange(1, 3)
    children[killed - 1].send_signal(signal.SIGKILL)  # not waited for: it stays a zombie
    with pytest.raises(RankDeadError, match=f"rank {killed} is gone: its process ended") as caught:
        rounds_without_end(group)
    assert caught.value.rank == killed
    assert children[2 - killed].wait(timeout=30) == 1, "the other rank waits on"
    with pytest.raises(RankDeadError, match=f"rank {killed}"):
        group.isend(torch.zeros(1), 1)


def test_a_rank_that_sends_more_than_the_channel_holds_ends_with_the_others(
    children: list[subprocess.Popen[bytes]],
) -> None:
    group = start(children, 2)
    sending = group.isend(torch.zeros(100_000), 1)
    children[0].kill()
    with pytest.raises(RankDeadError, match="rank 1 is gone: its process ended"):
        sending.wait()


def test_a_process_that_ends_before_it_joins_is_missed() -> None:
    with (
        SharedMemoryRendezvous(2) as rendezvous,
        pytest.raises(RankDeadError, match=r"rank 1 is gone: it did not join in time"),
    ):
        SharedMemoryCollectives(rendezvous.address, 0, 2, timeout_s=0.05)


def test_a_wrong_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened: No such file"):
        SharedMemoryCollectives(str(tmp_path / "nothing"), 0, 2)
    (tmp_path / "other").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match="no group of 2 ranks"):
        SharedMemoryCollectives(str(tmp_path / "other"), 0, 2)
    with SharedMemoryRendezvous(3) as rendezvous, pytest.raises(ConfigError, match="no group of 2 ranks"):
        SharedMemoryCollectives(rendezvous.address, 0, 2)


def test_sizes_out_of_bounds_are_refused() -> None:
    for numbers in ({"size": 65}, {"size": 2, "slice_bytes": 100}, {"size": 2, "channel_bytes": 100}):
        with pytest.raises(ValueError, match="cannot be made of size"):
            SharedMemoryRendezvous(**numbers)  # type: ignore[arg-type]
