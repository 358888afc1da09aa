"""How tokens get to the experts of other ranks, and what those made of them back: the Protocol and its managers.

Knows which rank computes which pair of a token and one of its experts; does not know experts, weights or sums.

Shape legend: T tokens, K experts per token, I width, P pairs of token and expert that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quire_distributed.all2all_backends import refusal_of_backend
from quire_interfaces import ConfigError

if TYPE_CHECKING:
    from quire_distributed.collectives import Collectives

__all__ = ["All2AllManager", "AllGatherReduceScatter", "NaiveAll2All", "SumOfTokens", "make_all2all_manager"]

SumOfTokens = Callable[[Tensor, slice], Tensor]
"""(values [t, K, I] float32, which t of the T tokens) -> [t, I]: what the layer makes of the values of each token."""


class All2AllManager(Protocol):
    """Dispatch to the experts of all ranks, and combine, where every rank has all tokens: ranks of tensor parallelism.

    Every rank of the group calls these in the same order, with the same `owners`.
    """

    def dispatch(self, x: Tensor, owners: Tensor) -> Tensor:
        """The rows that this rank's experts take, in the order of the tokens, then of each one's experts.

        Args:
            x: [T, I], on every rank alike.
            owners: [T, K] int64, the rank that computes each pair of token and expert.

        Returns:
            [P, I].
        """
        ...

    def combine(self, values: Tensor, owners: Tensor, sum_: SumOfTokens) -> Tensor:
        """The sums of all tokens, alike on every rank.

        Args:
            values: [P, I] float32, what this rank's experts made of the rows of `dispatch`.
            owners: As in `dispatch`.
            sum_: Called with the values of some tokens in the order of their experts, whatever rank those came from.

        Returns:
            [T, I].

        Raises:
            RankDeadError: A rank of the group is gone.
        """
        ...


class NaiveAll2All:
    """Every rank gets the values of all ranks, and sums up all tokens: one collective, T * K rows to each rank."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def dispatch(self, x: Tensor, owners: Tensor) -> Tensor:
        """See `All2AllManager`: a choice of rows, nothing is sent."""
        return _own_rows(x, owners, self._group.rank)

    def combine(self, values: Tensor, owners: Tensor, sum_: SumOfTokens) -> Tensor:
        """See `All2AllManager`."""
        counts = torch.bincount(owners.flatten(), minlength=self._group.size).tolist()
        gathered = self._group.all_gather(values, dim=0, sizes=counts)
        return sum_(_by_pair(gathered, owners), slice(0, len(owners)))


class AllGatherReduceScatter:
    """Each rank sums up its share of the tokens, and gets the sums of the others: two collectives, but T * K / N rows
    to each of N ranks, and T rows of sums.

    A reduce-scatter whose sums have the order of the experts, not of the ranks.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def dispatch(self, x: Tensor, owners: Tensor) -> Tensor:
        """See `All2AllManager`: a choice of rows, nothing is sent."""
        return _own_rows(x, owners, self._group.rank)

    def combine(self, values: Tensor, owners: Tensor, sum_: SumOfTokens) -> Tensor:
        """See `All2AllManager`."""
        rank, size = self._group.rank, self._group.size
        begins = [len(owners) * i // size for i in range(size + 1)]
        shares = [slice(*ends) for ends in pairwise(begins)]
        counts = [torch.bincount(owners[share].flatten(), minlength=size).tolist() for share in shares]
        received = self._group.all_to_all(values, [each[rank] for each in counts], counts[rank])
        sums = sum_(_by_pair(received, owners[shares[rank]]), shares[rank])
        return self._group.all_gather(sums, dim=0, sizes=[share.stop - share.start for share in shares])


def make_all2all_manager(backend: str, group: Collectives) -> All2AllManager:
    """The manager of that name (`all2all_backends.ALL2ALL_BACKENDS`).

    Raises:
        ConfigError: There is none, or it needs a library that is not installed, or devices that the ranks are not on.
    """
    if backend == "naive":
        return NaiveAll2All(group)
    if backend == "allgather_reducescatter":
        return AllGatherReduceScatter(group)
    raise ConfigError(refusal_of_backend(backend), field="all2all_backend")


def _own_rows(x: Tensor, owners: Tensor, rank: int) -> Tensor:
    return x[torch.where(owners == rank)[0]]


def _by_pair(values: Tensor, owners: Tensor) -> Tensor:
    """Values rank by rank, and of each rank token by token -> [t, K, I] in the order of the pairs."""
    ordered = torch.empty_like(values)
    ordered[owners.flatten().argsort(stable=True)] = values
    return ordered.view(*owners.shape, values.shape[-1])
