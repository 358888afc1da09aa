"""Parts of tiny networks that take media."""

from __future__ import annotations

from typing import Any

from quire_testkit.parity.case import LLAMA_FIELDS

__all__ = ["text", "vision"]


def text(model_type: str, **fields: Any) -> dict[str, Any]:
    """A tiny language model of this type."""
    return {**LLAMA_FIELDS, "model_type": model_type, "tie_word_embeddings": False, **fields}


def vision(model_type: str, **fields: Any) -> dict[str, Any]:
    """A tiny vision tower of this type: four patches on each side of an image."""
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        **fields,
    }
