"""Ranks that are threads of one process: for tests, and to have all ranks of a model under one debugger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

import torch
from torch import Tensor

from quire_distributed.collectives import Collectives, PendingTensor
from quire_distributed.exchange import ArrivedTensor, ExchangeCollectives, ReceivingTensor
from quire_distributed.single import SingleRank
from quire_interfaces import RankDeadError

__all__ = ["ThreadCollectives", "run_thread_ranks", "thread_group"]

T = TypeVar("T")


class _Group:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[Sequence[Tensor]] = [()] * size
        """Of each rank, one tensor for each rank."""
        self.messages: dict[tuple[int, int], deque[Tensor]] = {}
        """(sender, receiver) -> tensors on their way."""
        self.subgroups: dict[tuple[int, ...], list[Collectives]] = {}
        """Members -> the group of these ranks alone."""
        self._changed = Condition()
        self._failure: RankDeadError | None = None
        self._num_arrived = 0
        self._round = 0

    def meet(self) -> None:
        """Wait until every rank has called this."""
        with self._changed:
            self.check()
            self._num_arrived += 1
            if self._num_arrived == self.size:
                self._num_arrived = 0
                self._round += 1
                self._changed.notify_all()
                return
            met = self._round
            self._changed.wait_for(lambda: self._round != met or self._failure is not None)
            if self._round == met:
                self.check()

    def post(self, sender: int, receiver: int, tensor: Tensor) -> None:
        with self._changed:
            self.check()
            self.messages.setdefault((sender, receiver), deque()).append(tensor)
            self._changed.notify_all()

    def take(self, sender: int, receiver: int) -> Tensor:
        with self._changed:
            messages = self.messages.setdefault((sender, receiver), deque())
            self._changed.wait_for(lambda: messages or self._failure is not None)
            if not messages:
                self.check()
            return messages.popleft()

    def subgroup(self, members: Sequence[int]) -> list[Collectives]:
        """The group of some of the ranks, made when the first of them asks."""
        with self._changed:
            return self.subgroups.setdefault(tuple(members), thread_group(len(members)))

    def fail(self, failure: RankDeadError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def check(self) -> None:
        """Raise where a rank is gone."""
        if self._failure is not None:
            raise RankDeadError(self._failure.rank, self._failure.cause)


class ThreadCollectives(ExchangeCollectives):
    """Collectives of one of the threads that are the ranks of a group; `thread_group` makes all of them."""

    def __init__(self, group: _Group, rank: int) -> None:
        super().__init__(rank, group.size)
        self._group = group
        self._receiving: list[deque[ReceivingTensor]] = [deque() for _ in range(group.size)]

    def _exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        group = self._group
        group.sent[self._rank] = sent
        group.meet()
        received = [
            tensors[self._rank] if sender == self._rank else tensors[self._rank].clone()
            for sender, tensors in enumerate(group.sent)
        ]
        group.meet()  # from here on the others may change what they sent
        for sender, (tensor, shape) in enumerate(zip(received, shapes, strict=True)):
            self._check_received(tensor, sender, shape, sent[0].dtype)
        return received

    def _check_received(self, tensor: Tensor, sender: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        if tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"rank {sender} sent {tensor.dtype} of shape {tuple(tensor.shape)}; "
                f"rank {self._rank} expects {dtype} of shape {tuple(shape)}"
            )

    def isend(self, x: Tensor, to: int) -> PendingTensor:
        self._check_peer(to)
        self._group.post(self._rank, to, x.clone(memory_format=torch.contiguous_format))
        return ArrivedTensor(x)

    def irecv(self, like: Tensor, from_: int) -> PendingTensor:
        self._check_peer(from_)
        return ReceivingTensor(self._receiving[from_], lambda: self._take(like, from_))

    def _take(self, like: Tensor, from_: int) -> Tensor:
        tensor = self._group.take(from_, self._rank)
        self._check_received(tensor, from_, like.shape, like.dtype)
        return tensor

    def barrier(self) -> None:
        self._group.meet()

    def check(self) -> None:
        self._group.check()

    def subgroup(self, members: Sequence[int]) -> Collectives:
        """This rank's end of the group of some ranks, each of which calls this; members in the order of their numbers
        there, and this rank is one of them."""
        group = self._group.subgroup(members)
        return group[list(members).index(self._rank)]

    def abort(self, cause: str) -> None:
        self._group.fail(RankDeadError(self._rank, cause))

    def close(self) -> None:
        self._group.fail(RankDeadError(self._rank, "it left the group"))


def thread_group(size: int) -> list[Collectives]:
    """Collectives of `size` ranks, each for one thread at a time; `SingleRank` if there is only one.

    Raises:
        ValueError: `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; a group has at least one rank")
    if size == 1:
        return [SingleRank()]
    group = _Group(size)
    return [ThreadCollectives(group, rank) for rank in range(size)]


def run_thread_ranks(size: int, function: Callable[[Collectives], T]) -> list[T]:
    """Run `function` once per rank of a new group, each in a thread of its own, and return the results by rank.

    A rank that raises aborts the group, so that the others end too.

    Raises:
        ValueError: `size` is below 1.
        Exception: What the first rank to fail raised.
    """
    group = thread_group(size)
    failures: list[BaseException] = []

    def run(collectives: Collectives) -> T:
        try:
            return function(collectives)
        except BaseException as error:
            failures.append(error)
            collectives.abort(f"it raised {type(error).__name__}: {error}")
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, collectives) for collectives in group]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
