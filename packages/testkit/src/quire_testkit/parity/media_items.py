"""Images and sounds as processors give them to the tiny networks of `MEDIA_CASES`. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire_interfaces import BESIDE_IMAGES, FeatureArray, MediaItem, Modality
from quire_testkit.parity.image_items import EMBED_TOKENS, image_arrays, joined_axis

__all__ = ["PLACEHOLDER", "START", "joined_arrays", "media_item", "media_tokens", "stored_item"]

PLACEHOLDER = 190
"""Token that stands for media."""
START = 192
"""Token before an item."""


def media_item(architecture: str, index: int) -> tuple[Modality, dict[str, Tensor]]:
    """The arrays of an item; items of different numbers differ."""
    generator = torch.Generator().manual_seed(index)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    arrays = _sound(architecture, index, values)
    return (Modality.IMAGE, image_arrays(architecture, index, values)) if arrays is None else (Modality.AUDIO, arrays)


def media_tokens(item: Mapping[str, Tensor], num_embeds: int) -> list[int]:
    """The tokens of an item that take embeddings."""
    tokens = item.get(EMBED_TOKENS)
    return [PLACEHOLDER] * num_embeds if tokens is None else tokens.tolist()


def joined_arrays(architecture: str, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The arrays of several items, as Transformers wants them together."""
    names = dict.fromkeys(name for item in items for name in item if name not in (EMBED_TOKENS, BESIDE_IMAGES))
    parts = {name: [item[name] for item in items if name in item] for name in names}
    return {name: torch.cat(arrays, dim=joined_axis(architecture, name)) for name, arrays in parts.items()}


def _sound(architecture: str, index: int, values: Callable[..., Tensor]) -> dict[str, Tensor] | None:
    """None for an architecture that sees, and for the images of one that does both."""
    if architecture.startswith("Qwen2Audio"):
        heard = torch.tensor([[1] * 40 + [0] * 20])
        return {"input_features": values(1, 16, 60), "feature_attention_mask": heard}
    if architecture.startswith("Gemma3n"):
        return _of_gemma3n(values) if index % 2 else None
    if architecture.startswith("InklingFor"):
        return _of_inkling(values) if index % 2 else None
    if architecture.startswith("Phi4Multimodal"):
        return _of_phi4(values) if index % 2 else None
    if architecture.startswith("VoxtralRealtime"):
        return {"input_features": values(1, 16, 8 * 72)}
    if architecture.startswith("Voxtral"):
        return {"input_features": values(1, 16, 64)}
    if architecture.startswith(("GlmAsr", "Qwen3ASR")):
        frames = 64 if architecture.startswith("GlmAsr") else 100
        mask = torch.ones(1, frames, dtype=torch.int64)
        return {"input_features": values(1, 16, frames), "input_features_mask": mask}
    if architecture.startswith(("AudioFlamingo3", "MusicFlamingo")):
        return {"input_features": values(1, 16, 64), "input_features_mask": torch.ones(1, 64, dtype=torch.int64)}
    if architecture.startswith("Moss"):
        masks = {"input_features_mask": torch.ones(1, 64, dtype=torch.int64), "padding_mask": torch.ones(1, 10_240)}
        return {"input_features": values(1, 16, 64), **masks}
    if architecture.startswith("FunAsr"):
        return {"input_features": values(1, 20, 16), "input_features_mask": torch.ones(1, 20, dtype=torch.int64)}
    if architecture.startswith("GraniteSpeech"):
        return {"input_features": values(1, 40, 16)}
    return None


def _of_inkling(values: Callable[..., Tensor]) -> dict[str, Tensor]:
    """A sound that ends before its frames do, as numbers of bins."""
    heard = torch.arange(12)[None] < 10
    bins = (values(1, 12, 8).abs() * 6).int().clamp_max(15)
    return {"audio_input_ids": bins, "audio_input_ids_mask": heard, EMBED_TOKENS: torch.full((10,), 191)}


def _of_gemma3n(values: Callable[..., Tensor]) -> dict[str, Tensor]:
    """A sound that ends before its frames do."""
    heard = torch.ones(1, 64, dtype=torch.bool)
    heard[0, 50:] = False
    tokens = torch.full((10,), 191)
    return {"input_features": values(1, 64, 16), "input_features_mask": heard, EMBED_TOKENS: tokens}


def _of_phi4(values: Callable[..., Tensor]) -> dict[str, Tensor]:
    """A sound behind an image: its prompts begin with one."""
    num_embeds, beside = torch.tensor([8]), {BESIDE_IMAGES: torch.ones(1, dtype=torch.int32)}
    return {
        "audio_input_features": values(1, 64, 16),
        "audio_embed_sizes": num_embeds,
        EMBED_TOKENS: torch.full((8,), 191),
        **beside,
    }


def stored_item(file: Path, modality: Modality, item: dict[str, Tensor], num_embeds: int) -> MediaItem:
    """The item, with its arrays one behind the other in a file."""
    features, content = [], b""
    for name, array in item.items():
        content += bytes(-len(content) % 64)
        dtype = str(array.dtype).removeprefix("torch.")
        features.append(FeatureArray(name, dtype, tuple(array.shape), len(content)))
        content += array.contiguous().numpy().tobytes()
    file.write_bytes(content)
    return MediaItem(modality=modality, key=file.name, num_embeds=num_embeds, path=str(file), features=tuple(features))
