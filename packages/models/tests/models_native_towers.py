"""Architectures whose towers are Quire's own, and what any towers make of items."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire_interfaces import Modality

NATIVE = [
    f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3", "Idefics3", "InternVL", "Lfm2Vl", "LightOnOcr", "Llava", "Mistral3", "Qwen2Audio", "Qwen2VL",
        "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen4Exp", "SmolVLM", "Voxtral",
    )
]  # fmt: skip


def embeddings(towers: Any, items: list[tuple[Modality, dict[str, Tensor]]]) -> list[Tensor]:
    (modality,) = {modality for modality, _ in items}
    encoded: list[Tensor] = towers.encode(modality, [arrays for _, arrays in items])
    return encoded
