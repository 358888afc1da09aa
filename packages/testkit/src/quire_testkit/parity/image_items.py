"""Images as processors give them to the tiny networks of `MEDIA_CASES`. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["EMBED_TOKENS", "image_arrays", "joined_axis"]

EMBED_TOKENS = "embed_token_ids"
"""Array of an item whose tokens for embeddings are of several kinds: what they are. Transformers does not take it."""

Values = Callable[..., Tensor]
"""Random float32 numbers of a shape."""

TILED = ("Idefics2", "Idefics3", "SmolVLM")
"""Architectures whose processors give an item several tiles."""
PACKED = ("MiniCPM",)
"""Architectures whose processors put the patches of all items side by side into one row."""
GRIDS = ((1, 4, 6), (1, 8, 4))
"""Patches by time, height and width."""


def image_arrays(architecture: str, index: int, values: Values) -> dict[str, Tensor]:
    """The arrays of an image; images of different numbers differ.

    Args:
        architecture: Class that takes it.
        index: Number of the image.
        values: Makes its pixels.
    """
    for names, arrays in _ARRAYS.items():
        if architecture.startswith(names):
            return arrays(index, values)
    return {"pixel_values": values(1, 3, 32, 32)}


def joined_axis(architecture: str, name: str) -> int:
    """Axis along which Transformers wants an array of several items to be joined."""
    if architecture.startswith(PACKED) and name == "pixel_values":
        return 3
    if architecture.startswith("Mllama"):
        return 1
    return 1 if architecture.startswith(TILED) and name.startswith("pixel") else 0


def _by_grid(*patch: int) -> Callable[[int, Values], dict[str, Tensor]]:
    """Patches of this shape one behind the other, with the grid that they make."""

    def arrays(index: int, values: Values) -> dict[str, Tensor]:
        grid = GRIDS[index % 2]
        return {
            "pixel_values": values(grid[0] * grid[1] * grid[2], *patch),
            "image_grid_thw": torch.tensor([grid]),
        }

    return arrays


def _by_merged_grid(index: int, values: Values) -> dict[str, Tensor]:
    return {**_by_grid(192)(index, values), "image_merge_sizes": torch.tensor([2])}


def _by_resolution(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 3, 3, 32, 32), "image_sizes": torch.tensor([[64, 30]])}


def _tiles(index: int, values: Values) -> dict[str, Tensor]:
    mask = torch.ones(1, 2, 32, 32, dtype=torch.bool)
    return {"pixel_values": values(1, 2, 3, 32, 32), "pixel_attention_mask": mask}


def _sized(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}


def _masked_patches(index: int, values: Values) -> dict[str, Tensor]:
    shape = {"spatial_shapes": torch.tensor([[4, 6]]), "pixel_attention_mask": torch.ones(1, 24, dtype=torch.int64)}
    return {"pixel_values": values(1, 24, 192), **shape}


def _of_video_llava(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values_images": values(1, 3, 32, 32)}


def _two_resolutions(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 3, 32, 32), "high_res_pixel_values": values(1, 3, 128, 128)}


def _packed(index: int, values: Values) -> dict[str, Tensor]:
    height, width = ((4, 8), (8, 4))[index % 2]
    return {"pixel_values": values(1, 3, 8, height * width * 8), "target_sizes": torch.tensor([[height, width]])}


def _with_crops(index: int, values: Values) -> dict[str, Tensor]:
    num_crops = 1 + index % 2
    return {
        "pixel_values": values(1, 3, 32, 32),
        "pixel_values_local": values(num_crops, 3, 32, 32),
        "num_local_patches": torch.tensor([num_crops]),
    }


def _positioned(index: int, values: Values) -> dict[str, Tensor]:
    height, width = ((4, 6), (6, 4))[index % 2]
    places = torch.full((1, 36, 2), -1)  # the others are padding
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places[0, : height * width] = torch.stack((columns, rows), dim=-1).flatten(0, 1)
    return {"pixel_values": values(1, 36, 48), "image_position_ids": places}


def _padded_tiles(index: int, values: Values) -> dict[str, Tensor]:
    present = torch.tensor([[True, index % 2 == 1]])
    pixels = values(1, 2, 3, 32, 32) * present[..., None, None, None]
    return {"pixel_values": pixels, "pixel_attention_mask": present}


def _by_height_and_width(index: int, values: Values) -> dict[str, Tensor]:
    height, width = ((4, 6), (8, 4))[index % 2]
    return {"pixel_values": values(height * width, 192), "image_grid_hw": torch.tensor([[height, width]])}


def _of_emu3(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}


def _of_deepseek_ocr(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 3, 128, 128)}


def _of_ovis2(index: int, values: Values) -> dict[str, Tensor]:
    start, grid, column, end, patches = [191], [193], [194], [196], [190] * 4
    tiles = patches + column + patches if index % 2 else []
    tokens = torch.tensor(start + patches + grid + tiles + end)
    return {"pixel_values": values(3 if tiles else 1, 3, 32, 32), EMBED_TOKENS: tokens}


def _of_fuyu(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(6, 192)}


def _of_inkling2(index: int, values: Values) -> dict[str, Tensor]:
    rows, columns = ((2, 3), (4, 2))[index % 2]
    return {"pixel_values": values(rows * columns, 8, 8, 3), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def _of_inkling(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values((6, 8)[index // 2 % 2], 2, 4, 4, 3)}


def _of_gemma3n(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 3, 64, 64)}


def _with_overview(index: int, values: Values) -> dict[str, Tensor]:
    return {"pixel_values": values(1, 2, 3, 32, 32)}


def _cropped(index: int, values: Values) -> dict[str, Tensor]:
    """An overview, and two crops beside or below one another, of which the second is half padding."""
    height, width = ((1, 2), (2, 1))[index // 2 % 2]
    present = torch.ones(1, 3, 4, 4)
    (present[0, 2, 2:] if height == 2 else present[0, 2, :, 2:]).fill_(0)
    return {
        "image_pixel_values": values(1, 3, 3, 32, 32),
        "image_sizes": torch.tensor([[32 * height, 32 * width]]),
        "image_attention_mask": present,
    }


def _in_tiles(index: int, values: Values) -> dict[str, Tensor]:
    """One to three tiles of four, in a row."""
    num_tiles = 1 + index % 3
    return {
        "pixel_values": values(1, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.tensor([[num_tiles]]),
        "aspect_ratio_mask": (torch.arange(4) < num_tiles).long()[None, None],
    }


_ARRAYS: dict[tuple[str, ...], Callable[[int, Values], dict[str, Tensor]]] = {
    ("Ernie4_5_VL",): _by_grid(48),
    ("Mllama",): _in_tiles,
    ("DeepseekVLHybrid",): _two_resolutions,
    ("CohereCompass", "Exaone4_5", "HyperCLOVAX", "MiniMaxM3", "Muse", "Qwen", "Glm"): _by_grid(96),
    ("Cosmos3Edge", "HunYuanVL"): _by_grid(192),
    ("PaddleOCR", "Kimi"): _by_grid(3, 8, 8),
    ("VideoLlama3",): _by_merged_grid,
    ("Granite4Vision", "LlavaNext", "LlavaOnevision"): _by_resolution,
    TILED: _tiles,
    PACKED: _packed,
    ("Mistral3", "LightOn"): _sized,
    ("Lfm2",): _masked_patches,
    ("PerceptionLM",): _with_overview,
    ("Phi4Multimodal",): _cropped,
    ("VideoLlava",): _of_video_llava,
    ("Step3p7",): _with_crops,
    ("DeepseekOcr2",): _of_deepseek_ocr,
    ("Emu3",): _of_emu3,
    ("Fuyu",): _of_fuyu,
    ("Gemma3n",): _of_gemma3n,
    ("Inkling2",): _of_inkling2,
    ("Inkling",): _of_inkling,
    ("Gemma4For",): _positioned,
    ("GraniteDocling",): _padded_tiles,
    ("Ovis2",): _of_ovis2,
    ("NemotronH",): _by_height_and_width,
}
"""How architectures begin -> the arrays of an image of theirs; for the others, one image of 32 x 32 pixels."""
