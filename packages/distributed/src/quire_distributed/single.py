"""A group of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire_distributed.collectives import PendingTensor
from quire_distributed.exchange import resolve_dim, resolve_sizes
from quire_interfaces import RankDeadError

__all__ = ["SingleRank"]


class SingleRank:
    """Collectives of a group of one rank: every result is the argument itself, without a copy."""

    def __init__(self) -> None:
        self._failure: RankDeadError | None = None

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def size(self) -> int:
        """1."""
        return 1

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        return self._slice(x, dim, sizes)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.barrier()
        return x

    def reduce_scatter(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        return self._slice(x, dim, sizes)

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        self._slice(x, 0, recv_sizes)
        return self._slice(x, 0, send_sizes)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if root != 0:
            raise ValueError(f"there is no rank {root} in a group of 1")
        self.barrier()
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError(f"there is no other rank {to} in a group of 1")

    def recv(self, like: Tensor, from_: int) -> Tensor:
        raise ValueError(f"there is no other rank {from_} in a group of 1")

    def isend(self, x: Tensor, to: int) -> PendingTensor:
        raise ValueError(f"there is no other rank {to} in a group of 1")

    def irecv(self, like: Tensor, from_: int) -> PendingTensor:
        raise ValueError(f"there is no other rank {from_} in a group of 1")

    def barrier(self) -> None:
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise RankDeadError(self._failure.rank, self._failure.cause)

    def abort(self, cause: str) -> None:
        self._failure = self._failure or RankDeadError(0, cause)

    def close(self) -> None:
        self.abort("it left the group")

    def _slice(self, x: Tensor, dim: int, sizes: Sequence[int] | None) -> Tensor:
        length = x.shape[resolve_dim(x, dim)]
        if sizes is not None:
            resolve_sizes("sizes", sizes, 1, length)
        self.barrier()
        return x
