"""A tower as data: how its inputs become tokens, its layers, its connector. Free of torch.

A family's function describes its tower with these records; `built_by` names the class that is made of them. Names are
those of the checkpoint, without the prefixes "model." and "thinker.".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from quire_interfaces import Modality
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import GatedMLPSpec, MLPSpec
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NormSpec

__all__ = [
    "ActivationSpec",
    "ConnectorStep",
    "ConvolutionSpec",
    "GridTowerSpec",
    "LearnedPositionsSpec",
    "MergeSpec",
    "PatchSpec",
    "PixelLayout",
    "PixelShuffleSpec",
    "PoolSpec",
    "SoundTowerSpec",
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
    is_linear: bool = False
    """The checkpoint has it as a linear layer, over the numbers of a patch as the processor gives them."""

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the weight in the checkpoint."""
        if self.is_linear:
            return (self.hidden_size, self.num_channels * self.patch_size**2)
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
    is_batched: bool = False
    """Both tensors have dimensions of one before their own, so that they have three."""


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
    channels_first: bool = False
    """The patches' first channels come first, then their second ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Squares of patches become their mean."""

    factor: int
    """Patches on a side of a square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """Tokens that stand next to each other become one, whose channels are theirs one behind the other."""

    num_tokens: int


PixelLayout = Literal["squares", "image", "padded_rows"]
"""How a processor gives the pixels of an item of any size, and which sizes stand beside them. "squares": patches,
[patches, numbers of a patch], square by square of the tower's `merge_size`, with frames, rows and columns, [grids, 3].
"image": [1, channels, height, width], with height and width, [1, 2]. "padded_rows": patches of some tiles row by row,
[tiles, most patches, numbers of a patch], with rows and columns, [tiles, 2]; what stands behind those is padding
(Tschannen et al. 2025, "SigLIP 2", NaFlex)."""

ConnectorStep = LinearSpec | NormSpec | ActivationSpec | PixelShuffleSpec | PoolSpec | MergeSpec
"""What a connector does at a time; names are full ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """What all towers have."""

    inputs: Mapping[Modality, tuple[str, ...]]
    """Modality -> names of the processor's outputs that the tower reads, pixels or spectrograms first."""
    layers: tuple[LayerSpec, ...]
    """Those that count: a network that takes features behind an earlier layer does not have the others."""
    intermediate_size: int
    """Width of the layers' feed-forward networks in the checkpoint; theirs is its `padded_size`."""
    layer_scales: tuple[str, ...] = ()
    """Names in a layer of the factors of what its attention and its feed-forward network give, one for each channel
    (Touvron et al. 2021, LayerScale); empty for none."""
    connector: tuple[ConnectorStep, ...]
    checkpoint: CheckpointNames = field(default_factory=CheckpointNames)
    built_by: ClassVar[str]
    """"module:class" of the tower that is made of it."""

    @property
    def connectors(self) -> tuple[tuple[ConnectorStep, ...], ...]:
        """Every connector."""
        return (self.connector,)

    def linears(self) -> Iterator[LinearSpec]:
        """Linear layers that may be quantized, as wide as they are kept: those of the layers and of the connectors."""
        for layer in self.layers:
            for mixer in layer.mixers:
                assert isinstance(mixer, EncoderAttentionSpec)
                yield from mixer.projections()
            assert isinstance(layer.feed_forward, MLPSpec | GatedMLPSpec)
            yield from layer.feed_forward.projections()
        yield from (step for steps in self.connectors for step in steps if isinstance(step, LinearSpec))


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTowerSpec(TowerSpec):
    """An encoder of images of one size, or of tiles of larger ones: pixels are [..., channels, height, width]."""

    patch: PatchSpec
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
    """An encoder of images and videos of any size (Wang et al. 2024, "Qwen2-VL", sec. 2.1). Frames do not see each
    other."""

    patch: PatchSpec
    merge_size: int
    """Patches on a side of the squares that become one embedding."""
    rope_theta: float = 0.0
    """Base of the rotation; the first half of its pairs turns by a patch's row, the other by its column. 0 for none."""
    alternates_frequencies: bool = False
    """Rows have every other frequency of a head's, columns those between (Pixtral); otherwise both have the same, of
    half a head."""
    pixel_layout: PixelLayout = "squares"
    """How the processor gives the pixels of an item."""
    input_norm: NormSpec | None = None
    """Before the layers."""
    final_norm: NormSpec | None = None
    """Behind the layers."""
    position_table: str = ""
    """Full name of a table of positions that is stretched to the grid of an image; empty for none."""
    position_side: int = 0
    """Positions on a side of that table."""
    is_antialiased: bool = False
    """Stretching averages over all positions of the table that a patch covers (SigLIP 2), and images are as large as
    the table from edge to edge; otherwise each patch lies between its nearest four, corners on corners (Qwen3-VL)."""
    window_size: int = 0
    """Squares on a side of a window, in layers whose patches see their window alone (Bai et al. 2025, "Qwen2.5-VL",
    sec. 2.1.1); 0 where all see the frame."""
    full_attention_layers: frozenset[int] = frozenset()
    """Layers without windows, where there are windows."""
    deepstack: tuple[tuple[int, tuple[ConnectorStep, ...]], ...] = ()
    """(layer, connector) of features that are taken behind earlier layers; they stand behind the others in an
    embedding (DeepStack)."""
    built_by: ClassVar[str] = "quire_models.towers.grid_tower:GridTower"

    @property
    def connectors(self) -> tuple[tuple[ConnectorStep, ...], ...]:
        return (self.connector, *(steps for _, steps in self.deepstack))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSpec:
    """A convolution over time, three frames wide, with a bias; an activation follows."""

    name: str
    in_channels: int
    out_channels: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundTowerSpec(TowerSpec):
    """Whisper's encoder (Radford et al. 2022, sec. 2.2) over spectrograms, [windows, mel bins, frames]; beside them may
    be a mask of the frames that are sound, [windows, frames], where the tower reads those alone."""

    convolutions: tuple[ConvolutionSpec, ...]
    act: str
    """Behind each convolution."""
    positions: str
    """Full name of the table of positions."""
    num_positions: int
    pools_pairs: bool = False
    """Two tokens become their mean before the last norm (Qwen2-Audio)."""
    final_norm: NormSpec
    built_by: ClassVar[str] = "quire_models.towers.sound_tower:SoundTower"
