"""The table of tokens, shared out between tensor-parallel ranks (Shoeybi et al. 2019, sec. 3).

A row comes from the rank that has it, as it is. On the CPU each rank sends its own; on a device, where the number of
these would have to be read first, the bytes of all ranks are summed, of which all but one rank's are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces.platforms import platform_of_type
from quire_models.layers.linear import Embedding
from quire_models.layers.scope import Scope
from quire_models.shards import OutputShard, split_outputs

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(Embedding):
    """ids [T] -> [T, size]: each rank has some of the rows, and brings those of a step's ids that are its own.

    Every rank calls this with the same ids.
    """

    __slots__ = ("_ends", "_group", "rank_rows")

    rank_rows: tuple[int, ...]

    def __init__(self, scope: Scope, vocab_size: int, size: int) -> None:
        """Args:
        scope: Has the ranks; each has all rows where there are fewer of these than ranks.
        """
        group = scope.tp_group
        assert group is not None
        sizes = split_outputs(vocab_size, group.size)
        super().__init__(scope, vocab_size, size, None if sizes is None else OutputShard.of(sizes, group.rank))
        self._group, self.rank_rows = group, sizes or ()
        self._ends = torch.tensor(self.rank_rows).cumsum(0).to(scope.device)

    def rows_of(self, ids: Tensor) -> Tensor:
        """[T, size] without adapters."""
        group = self._group
        if not self.rank_rows:
            return super().rows_of(ids)
        if not platform_of_type(ids.device.type).is_host:
            return self._rows_by_sum(ids)
        owners = torch.bucketize(ids, self._ends, right=True)
        counts = torch.bincount(owners, minlength=group.size).tolist()
        order = torch.argsort(owners, stable=True)
        own = ids[order].split(counts)[group.rank] - sum(self.rank_rows[: group.rank])
        gathered = group.all_gather(super().rows_of(own), dim=0, sizes=counts)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    def _rows_by_sum(self, ids: Tensor) -> Tensor:
        """`rows_of` in shapes that do not depend on what the ids are, for graphs."""
        rank = self._group.rank
        own = ids - sum(self.rank_rows[:rank])
        is_own = (own >= 0) & (own < self.rank_rows[rank])
        rows = super().rows_of(own.where(is_own, 0))
        rows = rows.where(is_own[:, None], 0).contiguous()
        return self._group.all_reduce(rows.view(torch.uint8)).view(rows.dtype)

    def part(self, shard: OutputShard | None) -> Tensor:
        """The rows of a shard; None for all. Every rank calls this where the shard is not that of its own rows."""
        if not self.rank_rows:
            return super().part(shard)
        if shard == OutputShard.of(self.rank_rows, self._group.rank):
            return super().part(None)
        whole = self._group.all_gather(super().part(None).contiguous(), dim=0, sizes=self.rank_rows)
        return whole if shard is None else whole[shard.start : shard.stop]
