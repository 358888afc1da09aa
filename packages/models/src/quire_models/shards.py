"""How the outputs of a layer and the heads of an attention are split between tensor-parallel ranks. Free of torch.

Every sharded linear layer is split over its outputs only (column-parallel, Shoeybi et al. 2019, sec. 3). An output is
then the same dot product over all inputs at any number of ranks, so that results have the same bits.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

__all__ = ["HeadShard", "OutputShard", "split_evenly", "split_heads", "split_outputs"]

LARGEST_UNIT = 64
"""Outputs that stay together where there are enough of them: a multiple of every kernel's tile."""


class OutputShard(NamedTuple):
    """The outputs of a linear layer that one rank computes."""

    start: int
    size: int
    total: int
    """Outputs of all ranks."""

    @property
    def stop(self) -> int:
        """The first output behind them."""
        return self.start + self.size

    @classmethod
    def of(cls, sizes: tuple[int, ...], rank: int) -> OutputShard:
        """The shard of a rank, where `sizes` are those of all ranks."""
        return cls(sum(sizes[:rank]), sizes[rank], sum(sizes))


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` parts of `total`, the larger ones first."""
    size, rest = divmod(total, parts)
    return tuple(size + (part < rest) for part in range(parts))


def split_outputs(total: int, parts: int) -> tuple[int, ...] | None:
    """Outputs of each rank, in whole units of a power of two; None where there are fewer outputs than ranks.

    The unit is the largest up to `LARGEST_UNIT` that comes out even, or of which each rank has eight.
    """
    if total < parts:
        return None
    unit = LARGEST_UNIT
    while unit > 1 and total % (unit * parts) and total < 8 * unit * parts:
        unit //= 2
    sizes = [each * unit for each in split_evenly(-(-total // unit), parts)]
    sizes[-1] -= sum(sizes) - total  # of the last unit, what there is
    return tuple(sizes)


class HeadShard(NamedTuple):
    """The heads of a self-attention that one rank computes: key-value heads with their query heads. Where there are
    fewer key-value heads than ranks, several ranks have one, and share its query heads out."""

    rank: int
    query_sizes: tuple[int, ...]
    """Query heads of each rank."""
    kv_start: int
    """The rank's first key-value head."""
    num_local_kv_heads: int
    num_heads: int
    """Query heads of all ranks."""
    num_kv_heads: int
    """Key-value heads of the network."""
    dcp_size: int = 1
    """Neighbouring ranks with the same key-value heads, each of which keeps some of the tokens (decode context
    parallel)."""

    @property
    def query_start(self) -> int:
        """The rank's first query head."""
        return sum(self.query_sizes[: self.rank])

    @property
    def num_local_heads(self) -> int:
        """Query heads of the rank."""
        return self.query_sizes[self.rank]

    @property
    def query_heads(self) -> slice:
        """The rank's query heads."""
        return slice(self.query_start, self.query_start + self.num_local_heads)

    @property
    def dcp_group(self) -> slice:
        """The ranks that have the same key-value heads and other tokens, itself among them."""
        first = self.rank // self.dcp_size * self.dcp_size
        return slice(first, first + self.dcp_size)

    @property
    def dcp_query_heads(self) -> slice:
        """The query heads of these ranks."""
        start = sum(self.query_sizes[: self.dcp_group.start])
        return slice(start, start + sum(self.query_sizes[self.dcp_group]))

    @property
    def kv_heads(self) -> slice:
        """The rank's key-value heads."""
        return slice(self.kv_start, self.kv_start + self.num_local_kv_heads)

    def queries(self, width: int) -> OutputShard:
        """The rank's rows of a projection with `width` outputs for each query head."""
        return OutputShard(self.query_start * width, self.num_local_heads * width, self.num_heads * width)

    def keys(self, width: int) -> OutputShard:
        """The rank's rows of a projection with `width` outputs for each key-value head."""
        return OutputShard(self.kv_start * width, self.num_local_kv_heads * width, self.num_kv_heads * width)


def split_heads(num_heads: int, num_kv_heads: int, rank: int, size: int, dcp_size: int = 1) -> HeadShard | None:
    """The heads of a rank; None where there are too few of them for each rank to have one.

    Args:
        dcp_size: Neighbouring ranks that have the same key-value heads and share out their query heads. Divides `size`.
    """
    if dcp_size > 1:
        group = split_heads(num_heads, num_kv_heads, rank // dcp_size, size // dcp_size)
        if group is None or min(group.query_sizes) < dcp_size:
            return None
        query_sizes = tuple(each for heads in group.query_sizes for each in split_evenly(heads, dcp_size))
        return group._replace(rank=rank, query_sizes=query_sizes, dcp_size=dcp_size)
    queries_per_kv_head = num_heads // num_kv_heads
    if num_kv_heads >= size:
        kv_sizes = split_evenly(num_kv_heads, size)
        query_sizes = tuple(each * queries_per_kv_head for each in kv_sizes)
        return HeadShard(rank, query_sizes, sum(kv_sizes[:rank]), kv_sizes[rank], num_heads, num_kv_heads)
    ranks_per_kv_head = split_evenly(size, num_kv_heads)
    if max(ranks_per_kv_head) > queries_per_kv_head:
        return None
    query_sizes = tuple(each for ranks in ranks_per_kv_head for each in split_evenly(queries_per_kv_head, ranks))
    kv_start = next(head for head, end in enumerate(accumulate(ranks_per_kv_head)) if rank < end)
    return HeadShard(rank, query_sizes, kv_start, 1, num_heads, num_kv_heads)
