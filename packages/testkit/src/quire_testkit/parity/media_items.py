"""Images and sounds as processors give them to the tiny networks of `MEDIA_CASES`. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_interfaces import Modality

__all__ = ["PLACEHOLDER", "START", "joins_tiles", "media_item"]

PLACEHOLDER = 190
"""Token that stands for media."""
START = 192
"""Token before an item."""
TILED = ("Idefics2", "Idefics3", "SmolVLM")
"""Architectures whose processors give an item several tiles."""
GRIDS = ((1, 4, 6), (1, 8, 4))
"""Patches by time, height and width."""


def media_item(architecture: str, index: int) -> tuple[Modality, dict[str, Tensor]]:
    """The arrays of an item; items of different numbers differ."""
    generator = torch.Generator().manual_seed(index)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    arrays = _sound(architecture, values)
    return (Modality.IMAGE, _image(architecture, index, values)) if arrays is None else (Modality.AUDIO, arrays)


def _image(architecture: str, index: int, values: Callable[..., Tensor]) -> dict[str, Tensor]:
    grid = GRIDS[index % 2]
    patches = grid[0] * grid[1] * grid[2]
    by_grid = {"image_grid_thw": torch.tensor([grid])}
    if architecture.startswith(("Qwen", "Glm")):
        return {"pixel_values": values(patches, 96), **by_grid}
    if architecture.startswith(("PaddleOCR", "Kimi")):
        return {"pixel_values": values(patches, 3, 8, 8), **by_grid}
    if architecture.startswith("VideoLlama3"):
        return {"pixel_values": values(patches, 192), **by_grid, "image_merge_sizes": torch.tensor([2])}
    if architecture.startswith(("LlavaNext", "LlavaOnevision")):
        return {"pixel_values": values(1, 3, 3, 32, 32), "image_sizes": torch.tensor([[64, 30]])}
    if architecture.startswith(TILED):
        mask = torch.ones(1, 2, 32, 32, dtype=torch.bool)
        return {"pixel_values": values(1, 2, 3, 32, 32), "pixel_attention_mask": mask}
    if architecture.startswith(("Mistral3", "LightOn")):
        return {"pixel_values": values(1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}
    if architecture.startswith("Lfm2"):
        shape = {"spatial_shapes": torch.tensor([[4, 6]]), "pixel_attention_mask": torch.ones(1, 24, dtype=torch.int64)}
        return {"pixel_values": values(1, 24, 192), **shape}
    return {"pixel_values_images" if architecture.startswith("VideoLlava") else "pixel_values": values(1, 3, 32, 32)}


def _sound(architecture: str, values: Callable[..., Tensor]) -> dict[str, Tensor] | None:
    """None for an architecture that sees."""
    if architecture.startswith("Qwen2Audio"):
        heard = torch.tensor([[1] * 40 + [0] * 20])
        return {"input_features": values(1, 16, 60), "feature_attention_mask": heard}
    if architecture.startswith("Voxtral"):
        return {"input_features": values(1, 16, 64)}
    if architecture.startswith(("GlmAsr", "Qwen3ASR")):
        frames = 64 if architecture.startswith("GlmAsr") else 100
        mask = torch.ones(1, frames, dtype=torch.int64)
        return {"input_features": values(1, 16, frames), "input_features_mask": mask}
    if architecture.startswith("GraniteSpeech"):
        return {"input_features": values(1, 40, 16)}
    return None


def joins_tiles(architecture: str) -> bool:
    """Whether the items of a prompt are tiles of one array for Transformers, not one item behind the other."""
    return architecture.startswith(TILED)
