"""The table of tokens, shared out between tensor-parallel ranks (Shoeybi et al. 2019, sec. 3).

Nothing is summed: a row comes from the rank that has it, as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        owners = torch.bucketize(ids, self._ends, right=True)
        counts = torch.bincount(owners, minlength=group.size).tolist()
        order = torch.argsort(owners, stable=True)
        own = ids[order].split(counts)[group.rank] - sum(self.rank_rows[: group.rank])
        gathered = group.all_gather(super().rows_of(own), dim=0, sizes=counts)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    def part(self, shard: OutputShard | None) -> Tensor:
        """The rows of a shard; None for all. Every rank calls this where the shard is not that of its own rows."""
        if not self.rank_rows:
            return super().part(shard)
        if shard == OutputShard.of(self.rank_rows, self._group.rank):
            return super().part(None)
        whole = self._group.all_gather(super().part(None).contiguous(), dim=0, sizes=self.rank_rows)
        return whole if shard is None else whole[shard.start : shard.stop]
