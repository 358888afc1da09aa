"""A tower as data: how its inputs become tokens, its layers, its connector. Free of torch.

A family's function describes its tower with these records; `vision_tower.py` makes modules of them. Names are those of
the checkpoint, without the prefixes "model." and "thinker.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire_interfaces import Modality
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NormSpec

__all__ = [
    "ActivationSpec",
    "ConnectorStep",
    "LearnedPositionsSpec",
    "PatchSpec",
    "PixelShuffleSpec",
    "PoolSpec",
    "TowerSpec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """A convolution whose kernel is as large as its stride: a linear layer over the numbers of a patch."""

    name: str
    hidden_size: int
    patch_size: int
    """Pixels on a side."""
    num_channels: int = 3
    has_bias: bool = True

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the weight in the checkpoint."""
        return (self.hidden_size, self.num_channels, self.patch_size, self.patch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositionsSpec:
    """A table of positions that is added to the patches, row by row of the image."""

    name: str
    """Full name of the tensor."""
    side: int
    """Patches on a side of the images that the table is of."""
    class_token: str = ""
    """Full name of the vector in front of each image's patches, which has the first position; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """A function of each number, by its name in `quire_models.config_fields.HIDDEN_ACTS`, right-hand side."""

    act: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelShuffleSpec:
    """Squares of patches become one token, whose channels are those of the patches one behind the other, row by row
    (Shi et al. 2016, backwards)."""

    factor: int
    """Patches on a side of a square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Squares of patches become their mean."""

    factor: int
    """Patches on a side of a square."""


ConnectorStep = LinearSpec | NormSpec | ActivationSpec | PixelShuffleSpec | PoolSpec
"""What a connector does at a time; names are full ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """An encoder of images of one size, or of tiles of larger ones, with its connector."""

    inputs: Mapping[Modality, str]
    """Modality -> name of the processor's output that has its pixels, [..., channels, height, width]."""
    image_size: int
    """Pixels on a side of a tile."""
    patch: PatchSpec
    positions: LearnedPositionsSpec
    input_norm: NormSpec | None = None
    """Before the layers (CLIP)."""
    layers: tuple[LayerSpec, ...]
    """Those that count: a network that takes features behind an earlier layer does not have the others."""
    final_norm: NormSpec | None = None
    keeps_class_token: bool = False
    """The class token goes on to the connector."""
    connector: tuple[ConnectorStep, ...]
    checkpoint: CheckpointNames = field(default_factory=CheckpointNames)
    arrangement: Literal["tiles"] = "tiles"
    """How the embeddings of an item's tiles follow each other: "tiles" for one behind the other."""
