"""Conformance suite of `quire_distributed.Collectives`: inherit it, say how to make a group, get the tests.

    class TestMyCollectives(CollectivesSuite):
        def make_group(self, size):
            return [MyCollectives(...) for rank in range(size)]

Ranks run in threads of the test's process; each result is compared with plain torch, bit by bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_distributed import Collectives
from quire_interfaces import EngineDeadError, RankDeadError

__all__ = ["CollectivesSuite"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
_TIMEOUT_S = 60


def random_tensor(shape: list[int], dtype: torch.dtype, seed: int, strided: bool = False) -> Tensor:
    """Random numbers of any magnitude; `strided` for a tensor that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    stored = [*shape[:-1], shape[-1] * 2] if strided else shape
    if dtype.is_floating_point:
        numbers = torch.randn(stored, generator=generator) * torch.exp(3 * torch.randn(stored, generator=generator))
    else:
        numbers = torch.randint(0, 2 if dtype == torch.bool else 256, stored, generator=generator)
    return numbers.to(dtype)[..., ::2] if strided else numbers.to(dtype)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """((r0 + r1) + r2) ..., in float32 for half precision."""
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return total.to(tensors[0].dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert torch.equal(actual, expected)


class CollectivesSuite:
    """Every collective gives what plain torch gives, in any order and with any delays; a rank that is gone ends all."""

    group_sizes = (2, 3)
    """Numbers of ranks that are tried."""
    large_length = 70_000
    """Length of a tensor that does not fit into one buffer."""
    num_rounds = 150
    """Collectives that follow one another in the test of random orders."""

    def make_group(self, size: int) -> list[Collectives]:
        """The ranks' ends of a new group."""
        raise NotImplementedError("the suite needs a group: override make_group")

    @pytest.fixture
    def make(self) -> Iterator[Callable[[int], list[Collectives]]]:
        groups: list[list[Collectives]] = []

        def make(size: int) -> list[Collectives]:
            groups.append(self.make_group(size))
            return groups[-1]

        yield make
        for collectives in (each for group in groups for each in group):
            collectives.close()

    def run(self, group: list[Collectives], function: Callable[[Collectives], Any]) -> list[Any]:
        """Results of the ranks, each of which runs in a thread."""
        return [future.result(timeout=_TIMEOUT_S) for future in self.start(group, function)]

    def start(self, group: list[Collectives], function: Callable[[Collectives], Any]) -> list[Future[Any]]:
        pool = ThreadPoolExecutor(len(group))
        futures = [pool.submit(function, collectives) for collectives in group]
        pool.shutdown(wait=False)
        return futures

    def test_ranks_are_numbered(self, make: Any) -> None:
        for size in self.group_sizes:
            group = make(size)
            assert [(each.rank, each.size) for each in group] == [(rank, size) for rank in range(size)]
            assert all(isinstance(each, Collectives) for each in group)

    @pytest.mark.parametrize("dtype", _DTYPES, ids=str)
    def test_all_gather_joins_slices_of_any_size(self, make: Any, dtype: torch.dtype) -> None:
        for size in self.group_sizes:
            group = make(size)
            shapes = [
                ([3, 5], -1),
                ([4, 2, 6], 1),
                ([7], 0),
                ([2, 3, 1], 0),
                ([0, 4], -1),
                ([1, self.large_length], -1),
            ]
            for seed, (shape, dim) in enumerate(shapes):
                for lengths in ([shape[dim]] * size, [(2 * rank) % 3 for rank in range(size)], [0] * size):
                    parts = []
                    for rank, length in enumerate(lengths):
                        own = list(shape)
                        own[dim] = length
                        parts.append(random_tensor(own, dtype, seed + 10 * rank, strided=seed % 2 == 1))
                    results = self.run(
                        group,
                        lambda each, p=parts, d=dim, s=lengths: each.all_gather(p[each.rank], d, s),  # type: ignore[misc]
                    )
                    for result in results:
                        assert_same(result, torch.cat(parts, dim))

    def test_all_gather_without_sizes_joins_along_the_last_dimension(self, make: Any) -> None:
        for size in self.group_sizes:
            parts = [random_tensor([3, 4], torch.float32, rank) for rank in range(size)]
            for result in self.run(make(size), lambda each, p=parts: each.all_gather(p[each.rank])):  # type: ignore[misc]
                assert_same(result, torch.cat(parts, -1))

    @pytest.mark.parametrize("dtype", _DTYPES, ids=str)
    def test_all_reduce_sums_in_the_order_of_the_ranks(self, make: Any, dtype: torch.dtype) -> None:
        for size in self.group_sizes:
            group = make(size)
            for seed, shape in enumerate(([3, 5], [1], [0], [2, 0, 3], [3, self.large_length], [33], [4, 6, 2])):
                parts = [random_tensor(shape, dtype, seed + 10 * rank, strided=seed % 2 == 1) for rank in range(size)]
                before = [part.clone() for part in parts]
                for result in self.run(group, lambda each, p=parts: each.all_reduce(p[each.rank])):  # type: ignore[misc]
                    assert_same(result, sum_of(parts))
                assert all(map(torch.equal, parts, before)), "an argument was changed"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
    def test_reduce_scatter_cuts_the_sum(self, make: Any, dtype: torch.dtype) -> None:
        for size in self.group_sizes:
            group = make(size)
            for seed, (lengths, dim) in enumerate((([2] * size, -1), ([0, 5, 1][:size], 0), ([0] * size, 1))):
                shape = [4, 3]
                shape[dim] = sum(lengths)
                parts = [random_tensor(shape, dtype, seed + 10 * rank) for rank in range(size)]
                results = self.run(
                    group,
                    lambda each, p=parts, d=dim, s=lengths: each.reduce_scatter(p[each.rank], d, s),  # type: ignore[misc]
                )
                for result, expected in zip(results, sum_of(parts).split(lengths, dim), strict=True):
                    assert_same(result, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
    def test_all_to_all_turns_rows_into_columns(self, make: Any, dtype: torch.dtype) -> None:
        for size in self.group_sizes:
            group = make(size)
            for seed in range(3):
                # Rank r has (r + 2 p + seed) % 4 rows for rank p; those of seed 2 are large.
                lengths = [[(rank + 2 * peer + seed) % 4 for peer in range(size)] for rank in range(size)]
                width = self.large_length if seed == 2 else 3
                parts = [random_tensor([sum(lengths[rank]), width], dtype, seed + 10 * rank) for rank in range(size)]
                received = [[lengths[peer][rank] for peer in range(size)] for rank in range(size)]
                results = self.run(
                    group,
                    lambda each, p=parts, s=lengths, r=received: each.all_to_all(  # type: ignore[misc]
                        p[each.rank], s[each.rank], r[each.rank]
                    ),
                )
                cut = [part.split(lengths[rank]) for rank, part in enumerate(parts)]
                for rank, result in enumerate(results):
                    assert_same(result, torch.cat([cut[peer][rank] for peer in range(size)]))

    def test_broadcast_gives_all_the_tensor_of_the_root(self, make: Any) -> None:
        for size in self.group_sizes:
            group = make(size)
            for root in range(size):
                for shape in ([2, 3], [0], [self.large_length]):
                    x = random_tensor(shape, torch.bfloat16, root)
                    results = self.run(
                        group,
                        lambda each, x=x, r=root: each.broadcast(x if each.rank == r else torch.empty_like(x), r),  # type: ignore[misc]
                    )
                    for result in results:
                        assert_same(result, x)
                        assert result.data_ptr() != x.data_ptr() or x.numel() == 0

    def test_tensors_between_two_ranks_keep_their_order(self, make: Any) -> None:
        for size in self.group_sizes:
            shapes = [[3], [self.large_length], [0, 2], [2, 2]]
            xs = [random_tensor(shape, torch.float32, seed) for seed, shape in enumerate(shapes)]

            def ring(each: Collectives, xs: list[Tensor] = xs) -> list[Tensor]:
                to, from_ = (each.rank + 1) % each.size, (each.rank - 1) % each.size
                sends = [each.isend(x + each.rank, to) for x in xs]
                pending = [each.irecv(torch.empty_like(x), from_) for x in xs]
                received = [one.wait() for one in reversed(pending)][::-1]
                assert all(one.wait() is result for one, result in zip(pending, received, strict=True))
                for send in sends:
                    send.wait()
                return received

            for rank, received in enumerate(self.run(make(size), ring)):
                for result, x in zip(received, xs, strict=True):
                    assert_same(result, x + (rank - 1) % size)

    def test_a_sent_tensor_may_be_changed_afterwards(self, make: Any) -> None:
        def send_zeros(each: Collectives) -> Tensor:
            x = torch.zeros(5)
            if each.rank == 0:
                each.send(x, 1)
                x.fill_(1)
            result = each.recv(torch.empty(5), 0) if each.rank == 1 else torch.zeros(5)
            gathered = each.all_gather(result)
            result.fill_(1)
            each.barrier()
            return gathered

        for result in self.run(make(2), send_zeros):
            assert_same(result, torch.zeros(10))

    def test_many_rounds_in_random_order_with_random_delays(self, make: Any) -> None:
        size = max(self.group_sizes)

        def rounds(each: Collectives) -> None:
            plan, delays = random.Random(1), random.Random(each.rank)
            for step in range(self.num_rounds):
                if delays.random() < 0.1:
                    time.sleep(delays.random() * 0.003)
                shape, dtype = [plan.randrange(1, 4), size * plan.randrange(3)], plan.choice(_DTYPES)
                parts = [random_tensor(shape, dtype, 100 * step + rank) for rank in range(size)]
                own = parts[each.rank]
                match plan.randrange(6):
                    case 0:
                        assert_same(each.all_gather(own), torch.cat(parts, -1))
                    case 1:
                        assert_same(each.all_reduce(own), sum_of(parts))
                    case 2:
                        expected = sum_of(parts).chunk(size, -1)[each.rank] if shape[1] else own
                        assert_same(each.reduce_scatter(own), expected.contiguous())
                    case 3:
                        assert_same(each.broadcast(own, step % size), parts[step % size])
                    case 4:
                        each.barrier()
                    case 5:
                        sending = each.isend(own, (each.rank + 1) % size)
                        assert_same(each.recv(own, (each.rank - 1) % size), parts[(each.rank - 1) % size])
                        sending.wait()

        self.run(make(size), rounds)

    def test_wrong_arguments_are_refused_before_anything_is_sent(self, make: Any) -> None:
        group = make(2)

        def refused(each: Collectives) -> Tensor:
            x = torch.zeros(2, 3)
            for call in (
                lambda: each.all_gather(x, 2),
                lambda: each.all_gather(x, -1, [3]),
                lambda: each.all_gather(x, -1, [4, 4]),
                lambda: each.reduce_scatter(x, 1),
                lambda: each.reduce_scatter(x, 0, [1, 2]),
                lambda: each.reduce_scatter(x, 0, [-1, 3]),
                lambda: each.all_to_all(x, [1, 2], [1, 1]),
                lambda: each.all_to_all(x, [1, 1], [1]),
                lambda: each.broadcast(x, 2),
                lambda: each.send(x, each.rank),
                lambda: each.send(x, 2),
                lambda: each.recv(x, -1),
            ):
                with pytest.raises(ValueError, match=r"\d"):
                    call()
            return each.all_reduce(x)

        for result in self.run(group, refused):
            assert_same(result, torch.zeros(2, 3))

    @pytest.mark.parametrize(
        "waits",
        [
            lambda each: each.barrier(),
            lambda each: each.all_gather(torch.zeros(3)),
            lambda each: each.all_reduce(torch.zeros(3)),
            lambda each: each.broadcast(torch.zeros(3), each.size - 1),
            lambda each: each.recv(torch.zeros(3), each.size - 1),
        ],
        ids=["barrier", "all_gather", "all_reduce", "broadcast", "recv"],
    )
    def test_an_abort_ends_whoever_waits_and_whoever_comes(self, make: Any, waits: Callable[..., Any]) -> None:
        for size in self.group_sizes:
            group = make(size)
            futures = self.start(group[:-1], waits)
            time.sleep(0.05)
            group[-1].abort("no memory")
            group[-1].abort("a second cause")
            for future in futures:
                with pytest.raises(RankDeadError, match=f"rank {size - 1} is gone: no memory") as caught:
                    future.result(timeout=_TIMEOUT_S)
                assert (caught.value.rank, caught.value.cause) == (size - 1, "no memory")
                assert isinstance(caught.value, EngineDeadError)
            for collectives in group:
                with pytest.raises(RankDeadError, match="no memory"):
                    collectives.barrier()

    def test_a_rank_that_leaves_ends_whoever_waits_for_it(self, make: Any) -> None:
        group = make(2)
        assert self.run(group, lambda each: each.all_reduce(torch.ones(1)).item()) == [2, 2]
        group[1].close()
        with pytest.raises(RankDeadError, match="rank 1 is gone: it left the group"):
            group[0].all_gather(torch.zeros(3))
        group[1].close()
