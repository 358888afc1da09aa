"""A tower that makes one vector of an image, as data. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_models.towers.tower_spec import TileTowerSpec

__all__ = ["AttentionPoolSpec", "VectorTowerSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoolSpec:
    """One vector of an image's tokens: a learned query attends to them, then a feed-forward network (SigLIP)."""

    name: str
    hidden_size: int
    num_heads: int
    intermediate_size: int
    act: str
    """Of the feed-forward network, as `MLPSpec` has it."""
    eps: float
    """Of the norm before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorTowerSpec(TileTowerSpec):
    """An encoder that makes one vector of an image, which no language model reads: that of the class token, or what
    `pool` makes of all tokens. The connector takes that vector."""

    pool: AttentionPoolSpec | None = None
    out_features: int
    """Numbers of the vector."""
    built_by: ClassVar[str] = "quire_models.towers.vector_tower:VectorTower"
