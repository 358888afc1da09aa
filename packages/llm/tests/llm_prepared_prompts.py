"""Prompts with media, prepared in this process: no process has to load torch for each of many models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_interfaces import MediaItem, Modality, RenderedPrompt
from quire_models import ModelConfig
from quire_multimodal import MediaConfig, PositionScheme, StoredItem, expand_placeholders, find_spans, place_media
from quire_multimodal.fingerprint import prompt_arguments, read_config
from quire_multimodal.processor import ItemProcessor
from quire_multimodal.store import write_features

__all__ = ["PreparedPrompts"]


class PreparedPrompts:
    """The processor of a checkpoint, and prompts with what it makes of items.

    Args:
        folder: Of the checkpoint; the items' files go beside it.
        config: How media are decoded.
    """

    def __init__(self, folder: Path, config: MediaConfig | None = None) -> None:
        self.processor = ItemProcessor.from_folder(folder, config or MediaConfig())
        self._folder = folder
        self._config = read_config(folder)
        self._scheme = PositionScheme.from_config(self._config)
        model = ModelConfig.from_path(folder)
        assert model.media is not None
        self._is_prefix_lm, self._is_cross = model.media.is_prefix_lm, bool(model.media.cross_attention_layers)
        self._num_items = 0

    def prompt(self, text: str, media: Mapping[str, Sequence[Any]], **arguments: Any) -> RenderedPrompt:
        """A prompt for the engine.

        Args:
            text: With a placeholder for each item.
            media: Modality -> decoded items, as the processor takes them.
            arguments: Of the processor.
        """
        present = [Modality(kind) for kind, values in media.items() if values]
        items = [
            self._item(Modality(kind), value, arguments | prompt_arguments(self._config, Modality(kind), present))
            for kind, values in media.items()
            for value in values
        ]
        placeholders = {str(kind): str(self.processor.placeholder(kind)) for kind in self.processor.modalities}
        expanded, ordered = expand_placeholders(text, items, placeholders, frame=self.processor.frame)
        token_ids = self.processor.processor.tokenizer(expanded, add_special_tokens=False)["input_ids"]
        spans = find_spans(ordered, token_ids, 1 if self._is_cross else None)
        media = place_media(ordered, spans, len(token_ids), self._scheme)
        if self._is_cross:
            media = media.as_cross_attended()
        if self._is_prefix_lm:
            media = media.as_prefix(token_ids)
        return RenderedPrompt(token_ids=token_ids, media=media if items else None)

    def _item(self, modality: Modality, value: Any, arguments: Mapping[str, Any]) -> StoredItem:
        prepared = self.processor.process(modality, value, arguments)
        self._num_items += 1
        path = self._folder / f"item-{self._num_items}"
        features, num_bytes = write_features(path, prepared.features)
        facts = {name: array.tolist() for name, array in prepared.features.items() if array.nbytes < 4096}
        item = MediaItem(
            modality=modality,
            key=path.name,
            num_embeds=prepared.num_embeds,
            path=str(path),
            features=tuple(features),
        )
        return StoredItem(item, prepared.text, tuple(prepared.embed_token_ids), facts, num_bytes)
