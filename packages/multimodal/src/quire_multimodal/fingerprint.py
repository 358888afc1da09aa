"""What the files of a checkpoint say of media, and what else than the media decides what a processor makes of them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import BESIDE_IMAGES, Modality

__all__ = ["fingerprint", "prompt_arguments", "read_config"]

_FILES = (
    "preprocessor_config.json", "processor_config.json", "tekken.json", "tokenizer.json",
    "video_preprocessor_config.json",
)  # fmt: skip


def fingerprint(folder: Path | str, arguments: Any = None) -> str:
    """Names what a processor makes of the same media: hex digest of its files and arguments and of the library."""
    digest = hashlib.sha256()
    for name in _FILES:
        path = Path(folder) / name
        digest.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    versions = [importlib.metadata.version(name) for name in ("transformers", "pillow")]
    digest.update(json.dumps([versions, arguments], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def prompt_arguments(config: Mapping[str, Any], modality: Modality, present: Collection[Modality]) -> dict[str, Any]:
    """Arguments of the processor that follow from what else a prompt has: Phi-4 multimodal's tower hears with another
    connector where there are images.

    Args:
        config: The checkpoint's config.json.
        modality: Of the item.
        present: Modalities of all items of the prompt.
    """
    hears_otherwise = modality == Modality.AUDIO and Modality.IMAGE in present
    return {BESIDE_IMAGES: True} if hears_otherwise and config.get("model_type") == "phi4_multimodal" else {}


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json, with the fields of its thinker, or of a retriever's network with towers, over its
    own; empty without one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return {**config, **config.get("thinker_config", {}), **config.get("vlm_config", {})}
