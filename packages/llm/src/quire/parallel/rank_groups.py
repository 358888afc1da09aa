"""The groups of ranks that a rank of an engine is in. Importing this module loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import quire_distributed
from quire_distributed import Mesh

if TYPE_CHECKING:
    from quire_distributed import Collectives

__all__ = ["RankGroups"]


class RankGroups(NamedTuple):
    """The groups that a rank is in."""

    world: Collectives
    """All ranks of the engine."""
    mesh: Mesh
    """The layout, as this rank sees it."""
    tp: Collectives | None = None
    """Those that share its layers; None for one alone."""
    pp: Collectives | None = None
    """The stages; None for one."""

    @classmethod
    def of(cls, world: Collectives, mesh: Mesh) -> RankGroups:
        """The groups of a rank; all ranks call this."""
        if mesh.pp == 1:
            return cls(world, mesh, tp=world)
        tp = quire_distributed.subgroup(world, mesh.group("tp")) if mesh.tp > 1 else None
        pp = quire_distributed.subgroup(world, mesh.group("pp")) if mesh.tp > 1 else world
        return cls(world, mesh, tp, pp)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.mesh.rank == 0

    @property
    def all(self) -> list[Collectives]:
        """Each of them once."""
        return list({id(group): group for group in (self.world, self.tp, self.pp) if group is not None}.values())

    def check(self) -> None:
        """Raise where a rank is gone (`Collectives.check`)."""
        for group in self.all:
            group.check()

    def close(self) -> None:
        """Leave them."""
        for group in self.all:
            group.close()
