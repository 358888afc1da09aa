"""Images and sounds as processors give them to the tiny networks of `MEDIA_CASES`. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quire_interfaces import Modality
from quire_testkit.parity.image_items import EMBED_TOKENS, image_arrays, joined_axis

__all__ = ["PLACEHOLDER", "START", "joined_arrays", "media_item", "media_tokens"]

PLACEHOLDER = 190
"""Token that stands for media."""
START = 192
"""Token before an item."""


def media_item(architecture: str, index: int) -> tuple[Modality, dict[str, Tensor]]:
    """The arrays of an item; items of different numbers differ."""
    generator = torch.Generator().manual_seed(index)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    arrays = _sound(architecture, values)
    return (Modality.IMAGE, image_arrays(architecture, index, values)) if arrays is None else (Modality.AUDIO, arrays)


def media_tokens(item: Mapping[str, Tensor], num_embeds: int) -> list[int]:
    """The tokens of an item that take embeddings."""
    tokens = item.get(EMBED_TOKENS)
    return [PLACEHOLDER] * num_embeds if tokens is None else tokens.tolist()


def joined_arrays(architecture: str, items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The arrays of several items, as Transformers wants them together."""
    names = [name for name in items[0] if name != EMBED_TOKENS] if items else []
    return {name: torch.cat([item[name] for item in items], dim=joined_axis(architecture, name)) for name in names}


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
