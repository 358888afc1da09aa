"""What the heads of tensor-parallel ranks attended to, side by side."""

from __future__ import annotations

from torch import Tensor

from quire_distributed import Collectives
from quire_models.layers.scope import Scope
from quire_models.shards import HeadShard

__all__ = ["GatherHeads"]


class GatherHeads:
    """[T, width of the rank's heads] -> [T, width of all heads]; what it is given where one rank has them all."""

    __slots__ = ("_group", "_sizes")

    def __init__(self, group: Collectives | None, sizes: tuple[int, ...]) -> None:
        """Args:
        group: The ranks; None for one that has all heads.
        sizes: Width of each rank's heads.
        """
        self._group, self._sizes = group, sizes

    @classmethod
    def of(cls, heads: HeadShard | None, head_dim: int, scope: Scope) -> GatherHeads:
        """For the attention of this scope, whose heads these are; None for all."""
        if heads is None:
            return cls(None, ())
        scope.head_shards[scope.prefix] = heads
        return cls(scope.tp_group, tuple(each * head_dim for each in heads.query_sizes))

    def __call__(self, attended: Tensor) -> Tensor:
        return (
            attended
            if self._group is None
            else self._group.all_gather(attended.contiguous(), dim=-1, sizes=self._sizes)
        )
