"""What a network of Transformers takes in a step with media: embeddings in the place of tokens', and what its language
model wants besides.

Shape legend: T tokens of the step, H hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quire_attention import MediaEmbeds
from quire_models.layers.deepstack import DeepstackFeatures

__all__ = ["MediaInputs"]

_MARKS = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
"""Fields of Ernie 4.5 VL's configuration: its experts are apart, some for text, some for media and the marks around
them."""


class MediaInputs:
    """The inputs of a decoder of Transformers, in steps with media and in those with text alone."""

    def __init__(self, model: Any, decoder: Any, deepstack_layers: tuple[int, ...], hidden_size: int) -> None:
        """Args:
        model: The whole network.
        decoder: Runs the layers.
        deepstack_layers: Those in front of which further features are added.
        """
        self._decoder, self._layers, self._hidden_size = decoder, deepstack_layers, hidden_size
        self._features = DeepstackFeatures()
        body = getattr(model, "model", None)
        parts: list[Any] = [getattr(body, name, None) for name in ("embed_vision", "embed_audio")]
        self._mark_embeddings = [part for part in parts if hasattr(part, "vocab_offset")]
        """Of Gemma 3n, whose tokens behind those of text, marks around media, have embeddings of their own; those of a
        modality end where the next begin."""
        self._mark_ids: Tensor | None = None
        """[marks] int64: tokens around media, which are for the experts of media; None where experts take any token."""
        if "moe_mm_token_type_ids" in inspect.signature(decoder.forward).parameters:
            ids = [getattr(model.config, name) for name in _MARKS]
            self._mark_ids = torch.tensor(ids, device=next(decoder.parameters()).device)
        for layer in deepstack_layers:
            decoder.layers[layer].register_forward_pre_hook(self._deepened(layer))

    def of(self, ids: Tensor, media: MediaEmbeds | None) -> dict[str, Any]:
        """Arguments of the decoder for a step.

        Args:
            ids: [T] int64; those of tokens that stand for media need not be in the table.
            media: Embeddings in the place of tokens'; None for text alone.
        """
        if self._mark_embeddings and (media is not None or bool((ids >= self._mark_embeddings[0].vocab_offset).any())):
            return self._of_gemma3n(ids, media)
        arguments = {"input_ids": ids[None]} if media is None else self._of_media(ids, media)
        if self._mark_ids is not None:
            is_of_media = torch.isin(ids, self._mark_ids)
            if media is not None:
                is_of_media[media.token_index] = True
            arguments["moe_mm_token_type_ids"] = is_of_media[None].int()
        return arguments

    def _of_gemma3n(self, ids: Tensor, media: MediaEmbeds | None) -> dict[str, Any]:
        """Arguments for a step with media, or with marks."""
        is_media = torch.zeros_like(ids, dtype=torch.bool)
        if media is not None:
            is_media[media.token_index] = True
        x: Tensor = self._decoder.get_input_embeddings()(ids.masked_fill(is_media, 0))
        for part in self._mark_embeddings:
            is_mark = (ids >= part.vocab_offset) & (ids < part.vocab_offset + part.vocab_size) & ~is_media
            x[is_mark] = part(input_ids=ids[is_mark]).to(x.dtype)
        if media is not None:
            x[media.token_index] = media.embeds.to(x.dtype)
        return {"inputs_embeds": x[None], "per_layer_inputs": self._decoder.get_per_layer_inputs(ids[None])}

    def _of_media(self, ids: Tensor, media: MediaEmbeds) -> dict[str, Any]:
        table = self._decoder.get_input_embeddings()
        x: Tensor = table(ids.index_fill(0, media.token_index, 0))
        rows = media.embeds[:, : self._hidden_size].to(x.dtype)
        self._features = DeepstackFeatures.of(media, self._layers, self._hidden_size)
        arguments: dict[str, Any] = {"inputs_embeds": x.index_copy(0, media.token_index, rows)[None]}
        if getattr(self._decoder, "hidden_size_per_layer_input", 0):
            # Each layer of Gemma 4 has embeddings of its own; there media count as padding.
            text = ids.index_fill(0, media.token_index, self._decoder.config.pad_token_id or 0)
            arguments["per_layer_inputs"] = self._decoder.get_per_layer_inputs(text[None], None)
        return arguments

    def clear(self) -> None:
        """Forget the features of the step."""
        self._features = DeepstackFeatures()

    def _deepened(self, layer: int) -> Any:
        def add(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            """Add the features to the residual stream [1, T, H], a layer's first argument."""
            return self._features.add(arguments[0][0], layer)[None], *arguments[1:]

        return add
