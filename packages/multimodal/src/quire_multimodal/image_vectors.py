"""Images of checkpoints that make one vector of each (CLIP, SigLIP): their image processor alone, and no text.

Runs in a preparing process, as `quire_multimodal.processor` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire_interfaces import CheckpointError, Modality
from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError
from quire_multimodal.fingerprint import read_config
from quire_multimodal.processor import ItemProcessor, ProcessedItem
from quire_multimodal.spans import PromptFrame

__all__ = ["ImageVectors", "has_image_vectors"]

_MODEL_TYPES = frozenset({"clip", "siglip"})
_PLACEHOLDER = "<image>"
"""Says that images are taken; no prompt has it."""
_TOKEN_ID = 0
"""Stands for an image in a prompt."""


def has_image_vectors(folder: Path | str) -> bool:
    """Whether a checkpoint reads images apart from texts."""
    return read_config(Path(folder)).get("model_type") in _MODEL_TYPES


class ImageVectors(ItemProcessor):
    """The image processor of a checkpoint. Not thread-safe.

    Args:
        images: An image processor of Transformers.
        config: Largest images that are decoded, and how they are.
    """

    def __init__(self, images: Any, config: MediaConfig) -> None:
        super().__init__(SimpleNamespace(image_processor=images), config)

    @classmethod
    def of_folder(cls, folder: Path | str, config: MediaConfig) -> ImageVectors:
        """The image processor of a checkpoint, of the kind that `config` names, or of the other one where that cannot
        be used.

        Raises:
            CheckpointError: the folder has none, or it cannot be loaded here.
        """
        transformers = importlib.import_module("transformers")
        found: ImageVectors | None = None
        for backend in dict.fromkeys((config.image_backend, "torchvision")):
            try:
                images = transformers.AutoImageProcessor.from_pretrained(str(folder), backend=backend)
            except Exception as error:
                if found is not None:
                    break
                raise CheckpointError(f"{folder}: the image processor cannot be loaded: {error}") from error
            found = cls(images, config)
            if not found.unusable:
                break
        assert found is not None
        return found

    @property
    def frame(self) -> PromptFrame | None:
        return None

    def placeholder(self, modality: Modality) -> str | None:
        return _PLACEHOLDER if modality == Modality.IMAGE else None

    def process(self, modality: Modality, value: Any, arguments: Mapping[str, Any] | None = None) -> ProcessedItem:
        _, tensors = self._ways[modality]
        try:
            features = self.processor.image_processor([value], **{**(arguments or {}), "return_tensors": tensors})
            pixels = np.ascontiguousarray(features["pixel_values"], np.float32)
        except Exception as error:  # processors check little, and fail as they please
            message = f"the processor refuses the {modality}: {error or type(error).__name__}"
            raise MediaError(message, code="media_processing_failed") from error
        return ProcessedItem(_PLACEHOLDER, 1, [_TOKEN_ID], {"pixel_values": pixels})

    def _possible_ways(self) -> list[tuple[str, str]]:
        return [("part", "np"), ("part", "pt")]

    def _take_embeds_text(self, modality: Modality, item: ProcessedItem) -> None:
        """Callers' own embeddings have no place in a prompt."""
