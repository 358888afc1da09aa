"""What the ranks of a group do together: the Protocol. Does not know how; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Collectives", "PendingTensor"]


@runtime_checkable
class PendingTensor(Protocol):
    """A tensor on its way between two ranks."""

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived (`irecv`) or may be changed again (`isend`), and return it.

        May be called again; the tensor is the same.

        Raises:
            RankDeadError: A rank of the group is gone, and the tensor has not arrived.
        """
        ...


@runtime_checkable
class Collectives(Protocol):
    """One rank's end of a group of ranks.

    Every rank of the group calls the same collectives in the same order, one at a time; shapes agree as each method
    says, dtypes always. Arguments are not changed, may be of any dtype, on any device that the implementation serves,
    empty, and not contiguous. Results are contiguous and belong to the caller, but in a group of one rank they are the
    arguments themselves. Sums run in the order of the ranks, ((r0 + r1) + r2) ..., so that all ranks get the same bits;
    floating point dtypes below 32 bits are summed in float32 and rounded once, bool is a logical or.

    Every method except `abort` and `close` raises RankDeadError, with the rank and the cause, once a rank of the group
    is gone (its process ended, it called `abort` or `close`) and the call cannot be completed. A group that lost a rank
    stays broken: nothing is retried. A ValueError for an argument is raised before anything is sent.
    """

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """The ranks' tensors, one behind the other along `dim`.

        Args:
            x: This rank's tensor. Its shape is that of the other ranks' but for `dim`.
            dim: Dimension along which they are joined.
            sizes: Length of `dim` on each rank; None where it is the same on all.

        Raises:
            ValueError: There is no such dimension, or `sizes` does not fit `x` or the group.
        """
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' tensors, which have one shape."""
        ...

    def reduce_scatter(self, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        """This rank's slice of the sum of the ranks' tensors, which have one shape.

        Args:
            x: This rank's whole tensor.
            dim: Dimension along which the sum is cut.
            sizes: Length of each rank's slice; None for equal ones.

        Raises:
            ValueError: There is no such dimension, or its length is not the sum of `sizes`, or cannot be cut equally.
        """
        ...

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """What the other ranks have for this one, one behind the other along dimension 0.

        Args:
            x: What this rank has for all, in the order of the ranks; the other dimensions are the same on all.
            send_sizes: Length of dimension 0 that goes to each rank.
            recv_sizes: Length of dimension 0 that comes from each rank: what that rank says in its `send_sizes`.

        Raises:
            ValueError: `send_sizes` does not fit `x` or the group, or `recv_sizes` does not fit the group.
        """
        ...

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """The tensor of rank `root`.

        Args:
            x: What is sent, on rank `root`; on others a tensor of that shape and dtype, whose contents do not matter.
            root: Number of the rank that sends.

        Raises:
            ValueError: There is no such rank.
        """
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to one rank, which receives it; tensors between two ranks keep their order.

        Raises:
            ValueError: There is no such rank, or it is this one.
        """
        ...

    def recv(self, like: Tensor, from_: int) -> Tensor:
        """Receive the next tensor that one rank sends.

        Args:
            like: A tensor of the shape, dtype and device of what comes; its contents do not matter.
            from_: Number of the rank that sends.

        Raises:
            ValueError: There is no such rank, or it is this one.
        """
        ...

    def isend(self, x: Tensor, to: int) -> PendingTensor:
        """Begin to `send`. `x` may be changed after `wait`, which every caller comes to call.

        Raises:
            ValueError: There is no such rank, or it is this one.
        """
        ...

    def irecv(self, like: Tensor, from_: int) -> PendingTensor:
        """Begin to `recv`; the tensor is awaited where it is first read. Ends in the order of the calls.

        Raises:
            ValueError: There is no such rank, or it is this one.
        """
        ...

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        ...

    def check(self) -> None:
        """Raise where a rank of the group is known to be gone, and do nothing else. Collectives on a device do not
        wait for the others on the host: what was read of the device counts once this was called behind it.

        Raises:
            RankDeadError: A rank of the group is gone.
        """
        ...

    def abort(self, cause: str) -> None:
        """Say that this rank has failed: whatever the ranks of the group wait for or call next raises RankDeadError.

        Returns at once, and may be called by any thread. Only the first call of the group counts.
        """
        ...

    def close(self) -> None:
        """Leave the group and free what it held. Others can complete what this rank took part in; later calls raise."""
        ...
