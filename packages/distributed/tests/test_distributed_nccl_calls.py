"""What is asked of NCCL, seen without GPUs: its process group is one that notes calls, and has gloo carry them out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire_distributed import Collectives, TorchCollectives, torch_distributed
from quire_interfaces import RankDeadError
from quire_testkit.conformance.collectives import CollectivesSuite

Call = tuple[str, tuple[Any, ...]]


class NotingGroup:
    """Has the methods of `ProcessGroupNCCL` that are used, for tensors on the CPU.

    Args:
        gloo: Carries them out.
        calls: Gets name of a method, and what tells how much it moves.
    """

    def __init__(self, gloo: Any, size: int, calls: list[Call]) -> None:
        self._gloo, self._size, self._calls = gloo, size, calls
        self.is_aborted = threading.Event()

    def _note(self, name: str, options: Any, *what: Any) -> None:
        assert options is None or not options.asyncOp, "a collective runs on the current stream"
        self._calls.append((name, what))

    def _allgather_base(self, out: Tensor, own: Tensor, options: Any) -> Any:
        assert out.is_contiguous()
        assert own.is_contiguous()
        assert (out.dtype, out.numel()) == (own.dtype, self._size * own.numel())
        self._note("all_gather", options, own.numel())
        return self._gloo._allgather_base(out, own, options)

    def alltoall_base(
        self, out: Tensor, sent: Tensor, recv_sizes: Sequence[int], send_sizes: Sequence[int], options: Any
    ) -> Any:
        assert (out.ndim, sent.ndim) == (1, 1), "sizes are of the first dimension"
        assert (sum(recv_sizes), sum(send_sizes)) == (out.numel(), sent.numel())
        self._note("all_to_all", options, list(recv_sizes), list(send_sizes))
        return self._gloo.alltoall_base(out, sent, recv_sizes, send_sizes, options)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        assert all(each.dtype in (torch.uint8, torch.int8, torch.int32, torch.int64) for each in tensors)
        self._note("all_reduce", options, tensors[0].dtype, tensors[0].numel())
        return self._gloo.allreduce(tensors, options)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self._note("send", None, to, tensors[0].numel())
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], from_: int, tag: int) -> Any:
        self._note("recv", None, from_, tensors[0].numel())
        return self._gloo.recv(tensors, from_, tag)

    def abort(self) -> None:
        self.is_aborted.set()


CALLS: list[Call] = []
"""Of all groups of a test."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    monkeypatch.setattr(torch_distributed, "_sends_with_nccl", lambda x: True)
    CALLS.clear()
    return CALLS


def make_group(size: int) -> list[Collectives]:
    store = dist.HashStore()

    def make(rank: int) -> TorchCollectives:
        own = TorchCollectives(store, rank, size, host="127.0.0.1")
        own._nccl = NotingGroup(own._gloo, size, CALLS)
        own._has_met = True
        return own

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


class TestNcclCalls(CollectivesSuite):
    num_rounds = 60

    def make_group(self, size: int) -> list[Collectives]:
        return make_group(size)


def of_both(function: Callable[[Collectives], Tensor]) -> list[Tensor]:
    group = make_group(2)
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(function, group))
    finally:
        for each in group:
            each.close()


def test_parts_of_one_size_are_gathered_in_one_call(calls: list[Call]) -> None:
    first, second = of_both(lambda each: each.all_gather(torch.full((3, 4), each.rank, dtype=torch.bfloat16), -1))
    assert first.tolist() == second.tolist() == [[0.0] * 4 + [1.0] * 4] * 3
    assert calls == [("all_gather", (24,))] * 2, "bytes of one rank's part"


def test_uneven_parts_are_filled_up_and_gathered_in_one_call(calls: list[Call]) -> None:
    sizes = [4, 3]
    own = [torch.arange(2 * size, dtype=torch.float32).view(2, size) for size in sizes]
    first, second = of_both(lambda each: each.all_gather(own[each.rank], -1, sizes))
    assert torch.equal(first, torch.cat(own, -1))
    assert torch.equal(second, first)
    assert calls == [("all_gather", (2 * 4 * 4,))] * 2


def test_whole_numbers_are_summed_by_nccl_and_others_in_the_order_of_ranks(calls: list[Call]) -> None:
    of_both(lambda each: each.all_reduce(torch.ones(5, dtype=torch.uint8)))
    assert calls == [("all_reduce", (torch.uint8, 5))] * 2
    calls.clear()
    of_both(lambda each: each.all_reduce(torch.ones(5)))
    assert calls == [("all_gather", (20,))] * 2


def test_rows_go_to_ranks_without_a_copy_of_them(calls: list[Call]) -> None:
    rows = torch.arange(6).view(3, 2)
    first, second = of_both(
        lambda each: each.all_to_all(rows, [[3, 0], [1, 2]][each.rank], [[3, 1], [0, 2]][each.rank])
    )
    assert first.tolist() == [*rows.tolist(), rows[0].tolist()]
    assert second.tolist() == rows[1:].tolist()
    assert sorted(calls) == [("all_to_all", ([0, 32], [16, 32])), ("all_to_all", ([48, 16], [48, 0]))]


def test_a_rank_that_fails_aborts_the_communicators() -> None:
    group = make_group(2)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: each.all_gather(torch.ones(2)), group))
            for each in group:
                each.check()
            waiting = pool.submit(lambda: group[0].all_gather(torch.ones(2)))
            group[1].abort("no memory")
            with pytest.raises(RankDeadError, match="rank 1 is gone: no memory"):
                waiting.result(timeout=20)
        with pytest.raises(RankDeadError, match="rank 1 is gone: no memory"):
            group[0].check()
        groups: list[Any] = list(group)
        assert all(each._nccl.is_aborted.wait(10) for each in groups)
    finally:
        for each in group:
            each.close()


def test_nccl_neither_gives_up_nor_ends_the_process_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Made:
        Options = dist.ProcessGroupNCCL.Options

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options._timeout, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))

        def abort(self) -> None:
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Made)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    group: list[Any] = list(make_group(2))
    try:
        group[0]._nccl = None
        group[0]._nccl_group()
    finally:
        for each in group:
            each.close()
    assert made == [(0, 2, timedelta(days=365), "0")]


def test_nobody_makes_a_communicator_with_a_rank_that_is_gone(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_distributed, "_sends_with_nccl", lambda x: x.dtype == torch.float32)
    group: list[Any] = list(make_group(2))
    try:
        group[0]._has_met = False
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group[0].all_gather, torch.ones(2))
            group[1].abort("no memory")
            with pytest.raises(RankDeadError, match="rank 1 is gone: no memory"):
                waiting.result(timeout=20)
        assert calls == []
    finally:
        for each in group:
            each.close()
