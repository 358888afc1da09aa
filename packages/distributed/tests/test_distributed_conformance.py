"""Every implementation of `Collectives` against plain torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from quire_distributed import (
    Collectives,
    SharedMemoryCollectives,
    SharedMemoryRendezvous,
    SingleRank,
    TorchCollectives,
    thread_group,
)
from quire_interfaces import RankDeadError
from quire_testkit.conformance.collectives import CollectivesSuite


class TestSharedMemory(CollectivesSuite):
    """Ranks are threads here, each with a mapping of its own; processes are in test_distributed_shared_memory.py."""

    def make_group(self, size: int) -> list[Collectives]:
        with SharedMemoryRendezvous(size, slice_bytes=1 << 14, channel_bytes=1 << 14) as rendezvous:
            address = rendezvous.address
            with ThreadPoolExecutor(size) as pool:
                return list(pool.map(lambda rank: SharedMemoryCollectives(address, rank, size), range(size)))


class TestThreads(CollectivesSuite):
    def make_group(self, size: int) -> list[Collectives]:
        return thread_group(size)


class TestTorch(CollectivesSuite):
    """By gloo over loopback; ranks are threads here, processes are in test_distributed_torch.py."""

    num_rounds = 80

    def make_group(self, size: int) -> list[Collectives]:
        store = dist.HashStore()
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: TorchCollectives(store, rank, size, host="127.0.0.1"), range(size)))


def test_a_single_rank_gives_its_arguments_back() -> None:
    (single,) = thread_group(1)
    assert isinstance(single, SingleRank)
    assert isinstance(single, Collectives)
    x = torch.randn(3, 4)
    results = [single.all_gather(x), single.all_gather(x, 0, [3]), single.all_reduce(x), single.broadcast(x)]
    results += [single.reduce_scatter(x), single.reduce_scatter(x, 1, [4]), single.all_to_all(x, [3], [3])]
    assert all(result is x for result in results)


def test_a_single_rank_checks_its_arguments() -> None:
    single = SingleRank()
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="dim is 2"):
        single.all_gather(x, 2)
    with pytest.raises(ValueError, match="its sum must be 4"):
        single.reduce_scatter(x, -1, [3])
    for call in (single.send, single.recv, single.isend, single.irecv):
        with pytest.raises(ValueError, match="there is no other rank"):
            call(x, 0)
    with pytest.raises(ValueError, match="no rank 1"):
        single.broadcast(x, 1)


def test_a_single_rank_that_aborted_raises() -> None:
    single = SingleRank()
    single.abort("no memory")
    single.close()
    for call in (single.all_gather, single.all_reduce, single.reduce_scatter, single.broadcast):
        with pytest.raises(RankDeadError, match="rank 0 is gone: no memory"):
            call(torch.zeros(2))
