"""A tower as data: how its inputs become tokens, its layers, its connector. Free of torch.

A family's function describes its tower with these records; `built_by` names the class that is made of them. Names are
those of the checkpoint, without the prefixes "model." and "thinker.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from quire_interfaces import Modality
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NormSpec

__all__ = [
    "ActivationSpec",
    "ConnectorStep",
    "GridTowerSpec",
    "LearnedPositionsSpec",
    "MergeSpec",
    "PatchSpec",
    "PixelShuffleSpec",
    "PoolSpec",
    "TileTowerSpec",
    "TowerSpec",
    "padded_size",
]


def padded_size(size: int) -> int:
    """The next multiple of 32. Products over another number of inputs are several times slower on a CPU, whose matrix
    units take 32 at a time; towers are given zeros."""
    return -(-size // 32) * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """A convolution whose kernel is as large as its stride: a linear layer over the numbers of a patch."""

    name: str
    hidden_size: int
    patch_size: int
    """Pixels on a side."""
    num_channels: int = 3
    num_frames: int = 0
    """Frames of a patch of a video; 0 for a kernel without that dimension."""
    has_bias: bool = True

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the weight in the checkpoint."""
        frames = (self.num_frames,) if self.num_frames else ()
        return (self.hidden_size, self.num_channels, *frames, self.patch_size, self.patch_size)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """Tokens that stand next to each other become one, whose channels are theirs one behind the other."""

    num_tokens: int


ConnectorStep = LinearSpec | NormSpec | ActivationSpec | PixelShuffleSpec | PoolSpec | MergeSpec
"""What a connector does at a time; names are full ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """What all towers have."""

    inputs: Mapping[Modality, tuple[str, ...]]
    """Modality -> names of the processor's outputs that the tower reads, pixels first."""
    patch: PatchSpec
    layers: tuple[LayerSpec, ...]
    """Those that count: a network that takes features behind an earlier layer does not have the others."""
    intermediate_size: int
    """Width of the layers' feed-forward networks in the checkpoint; theirs is its `padded_size`."""
    connector: tuple[ConnectorStep, ...]
    checkpoint: CheckpointNames = field(default_factory=CheckpointNames)
    built_by: ClassVar[str]
    """"module:class" of the tower that is made of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTowerSpec(TowerSpec):
    """An encoder of images of one size, or of tiles of larger ones: pixels are [..., channels, height, width]."""

    image_size: int
    """Pixels on a side of a tile."""
    positions: LearnedPositionsSpec
    input_norm: NormSpec | None = None
    """Before the layers (CLIP)."""
    final_norm: NormSpec | None = None
    keeps_class_token: bool = False
    """The class token goes on to the connector."""
    built_by: ClassVar[str] = "quire_models.towers.tile_tower:TileTower"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTowerSpec(TowerSpec):
    """An encoder of images and videos of any size (Wang et al. 2024, "Qwen2-VL", sec. 2.1). Their pixels come patch by
    patch, [patches, numbers of a patch], square by square of `merge_size`, with their frames, rows and columns beside
    them, [1, 3]. Frames do not see each other."""

    merge_size: int
    """Patches on a side of the squares that become one embedding."""
    rope_theta: float
    """Base of the rotation; the first half of its pairs turns by a patch's row, the other by its column."""
    position_table: str = ""
    """Full name of a table of positions that is stretched to the grid of an image (Qwen3-VL); empty for none."""
    position_side: int = 0
    """Positions on a side of that table."""
    window_size: int = 0
    """Squares on a side of a window, in layers whose patches see their window alone (Bai et al. 2025, "Qwen2.5-VL",
    sec. 2.1.1); 0 where all see the frame."""
    full_attention_layers: frozenset[int] = frozenset()
    """Layers without windows, where there are windows."""
    deepstack: tuple[tuple[int, tuple[ConnectorStep, ...]], ...] = ()
    """(layer, connector) of features that are taken behind earlier layers; they stand behind the others in an
    embedding (DeepStack)."""
    built_by: ClassVar[str] = "quire_models.towers.grid_tower:GridTower"
