"""How ranks are laid out. Knows numbers only; does not know tensors or how ranks talk to each other.

The layout is vLLM's: tensor parallel ranks are neighbours, then come pipeline stages, then data parallel replicas, so
that rank = (dp_rank * pp + pp_rank) * tp + tp_rank. Decode context parallel groups lie inside tensor parallel ones;
expert parallel groups lie inside what tensor and data parallelism make of one pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from quire_interfaces import ConfigError

__all__ = ["MESH_AXES", "Mesh", "MeshAxis"]

MeshAxis = Literal["tp", "pp", "dp", "ep", "dcp"]
"""Tensor, pipeline, data, expert and decode context parallelism."""
MESH_AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks of a model and the place of one of them.

    Raises:
        ConfigError: A size is below 1, `rank` is not below `world_size`, `dcp` does not divide `tp`, or `ep` does not
            divide `tp * dp`.
    """

    tp: int = 1
    """Tensor parallel size: ranks that share each layer."""
    pp: int = 1
    """Pipeline parallel size: stages of consecutive layers."""
    dp: int = 1
    """Data parallel size: replicas that serve different requests."""
    ep: int = 1
    """Expert parallel size: ranks that hold different experts of a layer."""
    dcp: int = 1
    """Decode context parallel size: ranks that hold different tokens of the KV cache."""
    rank: int = 0
    """Number of this rank among all."""

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            if getattr(self, axis) < 1:
                raise ConfigError(f"{axis} is {getattr(self, axis)}; a parallel size is at least 1", field=axis)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}; it must be in 0..{self.world_size - 1}", field="rank")
        if self.tp % self.dcp:
            raise ConfigError(f"dcp is {self.dcp}; it must divide tp, which is {self.tp}", field="dcp")
        if (self.tp * self.dp) % self.ep:
            raise ConfigError(f"ep is {self.ep}; it must divide tp * dp, which is {self.tp * self.dp}", field="ep")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def tp_rank(self) -> int:
        """Number of this rank in its tensor parallel group."""
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // self.tp % self.pp

    @property
    def dp_rank(self) -> int:
        """Replica of this rank."""
        return self.rank // (self.tp * self.pp)

    @property
    def ep_rank(self) -> int:
        """Number of this rank in its expert parallel group."""
        return self._rank_in_stage % self.ep

    @property
    def dcp_rank(self) -> int:
        """Number of this rank in its decode context parallel group."""
        return self.tp_rank % self.dcp

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.pp_rank == self.pp - 1

    def at(self, rank: int) -> Mesh:
        """This mesh as another of its ranks sees it.

        Raises:
            ConfigError: `rank` is not below `world_size`.
        """
        return replace(self, rank=rank)

    def group_rank(self, axis: MeshAxis) -> int:
        """Number of this rank in its group along `axis`."""
        number: int = getattr(self, f"{axis}_rank")
        return number

    def group(self, axis: MeshAxis) -> tuple[int, ...]:
        """Ranks of the group along `axis` that this rank belongs to, in the order of their numbers in the group."""
        own = self._group_key(axis)
        members = [mesh for mesh in map(self.at, range(self.world_size)) if mesh._group_key(axis) == own]
        return tuple(mesh.rank for mesh in sorted(members, key=lambda mesh: mesh.group_rank(axis)))

    def groups(self, axis: MeshAxis) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, by their smallest rank; every rank is in one of them."""
        return tuple(sorted({self.at(rank).group(axis) for rank in range(self.world_size)}))

    @property
    def _rank_in_stage(self) -> int:
        """Number of this rank among those of all replicas that hold the same pipeline stage."""
        return self.dp_rank * self.tp + self.tp_rank

    def _group_key(self, axis: MeshAxis) -> tuple[int, ...]:
        """What the ranks of one group along `axis` have in common."""
        match axis:
            case "tp":
                return self.dp_rank, self.pp_rank
            case "pp":
                return self.dp_rank, self.tp_rank
            case "dp":
                return self.pp_rank, self.tp_rank
            case "ep":
                return self.pp_rank, self._rank_in_stage // self.ep
            case "dcp":
                return self.dp_rank, self.pp_rank, self.tp_rank // self.dcp
