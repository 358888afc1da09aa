"""Collectives out of one primitive: every rank has one tensor for each rank. For implementations of this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire_distributed.collectives import PendingTensor

__all__ = [
    "ArrivedTensor",
    "ExchangeCollectives",
    "ReceivingTensor",
    "as_bytes",
    "resolve_dim",
    "resolve_sizes",
    "sum_in_rank_order",
]


def resolve_dim(x: Tensor, dim: int) -> int:
    """`dim` counted from the front.

    Raises:
        ValueError: `x` has no such dimension.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}; the tensor has {x.dim()} dimensions")
    return dim % x.dim()


def resolve_sizes(name: str, sizes: Sequence[int], size: int, total: int | None = None) -> list[int]:
    """`sizes` as a list, one length for each rank of a group of `size`.

    Raises:
        ValueError: Their number is not `size`, one is below 0, or they do not add up to `total`.
    """
    if len(sizes) != size or min(sizes) < 0:
        raise ValueError(f"{name} is {list(sizes)}; it must have a length of at least 0 for each of {size} ranks")
    if total is not None and sum(sizes) != total:
        raise ValueError(f"{name} is {list(sizes)}; its sum must be {total}, the length that is cut")
    return list(sizes)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 of one dimension, without a copy."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum of tensors of one shape and dtype in their order; those below 32 bits are summed in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


class ArrivedTensor:
    """A `PendingTensor` that is there already."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        """The tensor."""
        return self._tensor


class ReceivingTensor:
    """A `PendingTensor` that is received when it is first waited for, after those before it in its queue.

    Args:
        queue: What is still to come from one sender; this tensor is put at its end.
        receive: Receives the sender's next tensor.
    """

    __slots__ = ("_queue", "_receive", "_tensor")

    def __init__(self, queue: deque[ReceivingTensor], receive: Callable[[], Tensor]) -> None:
        self._queue = queue
        self._receive = receive
        self._tensor: Tensor | None = None
        queue.append(self)

    def wait(self) -> Tensor:
        """The tensor, once it has arrived."""
        while self._tensor is None:
            first = self._queue[0]
            first._tensor = first._receive()
            self._queue.popleft()
        return self._tensor


class ExchangeCollectives(ABC):
    """Collectives of a group of at least two ranks, by `_exchange`; an implementation overrides what it does faster."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; it must be in 0..{size - 1}")
        self._rank = rank
        self._size = size

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    @abstractmethod
    def _exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Give every rank its tensor of `sent` and return what each rank has for this one, of these shapes.

        `sent` are contiguous and of one dtype; they may be one and the same tensor. What comes from this rank itself is
        `sent[rank]`; whatever else is returned belongs to the caller.
        """

    @abstractmethod
    def isend(self, x: Tensor, to: int) -> PendingTensor: ...

    @abstractmethod
    def irecv(self, like: Tensor, from_: int) -> PendingTensor: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def check(self) -> None: ...

    @abstractmethod
    def abort(self, cause: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        dim = resolve_dim(x, dim)
        sizes = self._gather_sizes(x, dim, sizes)
        shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
        return torch.cat(self._exchange([x.contiguous()] * self._size, shapes), dim)

    def _gather_sizes(self, x: Tensor, dim: int, sizes: Sequence[int] | None) -> list[int]:
        if sizes is None:
            return [x.shape[dim]] * self._size
        sizes = resolve_sizes("sizes", sizes, self._size)
        if sizes[self._rank] != x.shape[dim]:
            raise ValueError(f"sizes is {sizes}; rank {self._rank} has a tensor of length {x.shape[dim]}")
        return sizes

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(self._exchange([x.contiguous()] * self._size, [x.shape] * self._size))

    def reduce_scatter(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        dim = resolve_dim(x, dim)
        if sizes is None:
            if x.shape[dim] % self._size:
                raise ValueError(f"{x.shape[dim]} cannot be cut into {self._size} equal slices; give sizes")
            sizes = [x.shape[dim] // self._size] * self._size
        sizes = resolve_sizes("sizes", sizes, self._size, x.shape[dim])
        slices = [piece.contiguous() for piece in x.split(sizes, dim)]
        return sum_in_rank_order(self._exchange(slices, [slices[self._rank].shape] * self._size))

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        send_sizes, recv_sizes = self._all_to_all_sizes(x, send_sizes, recv_sizes)
        shapes = [(size, *x.shape[1:]) for size in recv_sizes]
        return torch.cat(self._exchange(x.contiguous().split(send_sizes), shapes))

    def _all_to_all_sizes(
        self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        resolve_dim(x, 0)
        send_sizes = resolve_sizes("send_sizes", send_sizes, self._size, x.shape[0])
        recv_sizes = resolve_sizes("recv_sizes", recv_sizes, self._size)
        if send_sizes[self._rank] != recv_sizes[self._rank]:
            raise ValueError(
                f"rank {self._rank} sends {send_sizes[self._rank]} to itself and receives {recv_sizes[self._rank]}"
            )
        return send_sizes, recv_sizes

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        self._check_rank(root)
        shapes: list[Sequence[int]] = [x.shape if rank == root else (0,) for rank in range(self._size)]
        sent = x.contiguous() if self._rank == root else x.new_empty((0,))
        result = self._exchange([sent] * self._size, shapes)[root]
        return result.clone() if self._rank == root else result

    def send(self, x: Tensor, to: int) -> None:
        self.isend(x, to).wait()

    def recv(self, like: Tensor, from_: int) -> Tensor:
        return self.irecv(like, from_).wait()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"there is no rank {rank} in a group of {self._size}")

    def _check_peer(self, rank: int) -> None:
        self._check_rank(rank)
        if rank == self._rank:
            raise ValueError(f"rank {rank} sends to itself")
