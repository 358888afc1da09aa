"""Images and sounds as processors give them to the tiny networks of `MEDIA_CASES`, and prompts with them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch
from models_paged_driver import PagedDriver
from torch import Tensor

from quire_interfaces import Modality
from quire_models import Network

PLACEHOLDER = 190
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


class MediaPrompt:
    """Text with items between, as a network of Quire's and one of Transformers' take it."""

    def __init__(self, network: Network, architecture: str, num_items: int) -> None:
        """Args:
        architecture: A name of `MEDIA_CASES`.
        """
        rng = random.Random(num_items)
        self._items = [media_item(architecture, index) for index in range(num_items)]
        self.token_ids = [rng.randrange(3, 180) for _ in range(9)]
        self.embeds: dict[int, Tensor] = {}
        """Token -> its row."""
        for modality, item in self._items:
            rows = network.encode_media(modality, [item])[0]
            start = len(self.token_ids) + 1
            self.token_ids += [192, *[PLACEHOLDER] * len(rows), *(rng.randrange(3, 180) for _ in range(7))]
            self.embeds.update({start + row: embed for row, embed in enumerate(rows)})
        self._sees_whole_spans = network.config.media is not None and network.config.media.is_bidirectional
        self._joins_tiles = architecture.startswith(TILED)

    def oracle_inputs(self, model: Any) -> dict[str, Tensor]:
        """Arguments of the whole network's forward."""
        ids = torch.tensor([self.token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in self._items[0][1] if self._items else ():
            tiles = self._joins_tiles and name.startswith("pixel")
            inputs[name] = torch.cat([item[name] for _, item in self._items], dim=1 if tiles else 0)
        if self._sees_whole_spans:
            inputs["token_type_ids"] = (ids == PLACEHOLDER).long()
        if hasattr(_body(model), "get_rope_index"):
            inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).long()
        return inputs

    def positions(self, model: Any) -> Tensor | None:
        """[3, tokens] of M-RoPE as Transformers counts them; None where there is one position each."""
        if not hasattr(_body(model), "get_rope_index"):
            return None
        known = inspect.signature(_body(model).get_rope_index).parameters
        inputs = {name: value for name, value in self.oracle_inputs(model).items() if name in known}
        positions: Tensor = _body(model).get_rope_index(**inputs)[0][:, 0].long()
        return positions

    def logits(self, network: Network, chunk: int, positions: Tensor | None = None) -> Tensor:
        """[tokens, vocab_size], computed `chunk` tokens at a time."""
        driver = PagedDriver(network, block_size=16, shuffle=True)  # type: ignore[arg-type]
        seq = driver.add(self.token_ids)
        seq.embeds, seq.positions = self.embeds, positions
        while seq.num_computed < len(seq.token_ids):
            end = min(seq.num_computed + chunk, len(seq.token_ids))
            while self._sees_whole_spans and end in self.embeds and end - 1 in self.embeds:
                end += 1  # spans are not cut
            driver.step((seq, end - seq.num_computed))
        return torch.stack(seq.logits)


def _body(model: Any) -> Any:
    return getattr(model, "model", model)
