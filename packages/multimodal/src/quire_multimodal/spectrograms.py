"""Sounds for networks whose encoder reads them in place of a prompt, as spectrograms (Whisper) or samples (Moonshine):
no processor of a checkpoint, no process of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import MediaItem, MediaSpan, Modality, PromptMedia
from quire_multimodal.config import MediaConfig
from quire_multimodal.decode import decode_audio, resample
from quire_multimodal.errors import MediaError
from quire_multimodal.preparer import ItemQuery, MediaPreparer
from quire_multimodal.sources import MediaSource, load
from quire_multimodal.store import StoredItem, write_features

__all__ = ["SpectrogramPreparer", "mono_samples"]

Spectrogram = Callable[[NDArray[np.float32]], NDArray[np.float32]]
NumTokens = Callable[[NDArray[np.float32]], int]
FEATURES = "input_features"
"""Name of a spectrogram among the arrays of its item, as Transformers' extractor calls it."""


def mono_samples(value: Any, native: float, rate: int) -> NDArray[np.float32]:
    """A sound that Python has decoded, as samples of one channel.

    Args:
        value: Floats [samples], [samples, channels] or [channels, samples].
        native: Samples in a second that there are.
        rate: Samples in a second that there are to be.

    Raises:
        MediaError: it is no such array, or empty, or the extra that resamples is not installed.
    """
    media = load(MediaSource(modality=Modality.AUDIO, value=(value, native)), MediaConfig())
    return resample(np.frombuffer(media.data, np.float32), native, rate)


class SpectrogramPreparer(MediaPreparer):
    """Prepares one sound for each prompt, which an encoder reads. Thread-safe.

    Args:
        config: Bounds and sources.
        spectrogram: Samples [S] -> [mel bins, frames]; or [frames, mel bins] or [1, S], where the encoder reads these.
        rate: Samples in a second that it takes.
        num_tokens: What it gives -> the number of tokens that the encoder makes of it.
        name: Of what it computes: other names are other contents.
    """

    def __init__(
        self, config: MediaConfig | None, spectrogram: Spectrogram, *, rate: int, num_tokens: NumTokens, name: str
    ) -> None:
        super().__init__(None, config)
        self.placeholders = {str(Modality.AUDIO): ""}
        self._spectrogram, self._rate, self._num_tokens = spectrogram, rate, num_tokens
        self._fingerprint = name

    def place(self, items: Sequence[StoredItem], token_ids: Sequence[int]) -> PromptMedia:
        """What the encoder reads: no token of the prompt stands for it. Raises MediaError for several sounds."""
        if len(items) != 1:
            raise MediaError(f"the encoder reads one sound, got {len(items)}").at("multi_modal_data.audio")
        return PromptMedia(spans=tuple(MediaSpan(item=each.item, start=0, length=0, embeds=()) for each in items))

    def hold(self, features: NDArray[np.float32]) -> StoredItem:
        """A spectrogram that was computed elsewhere, [mel bins, frames], kept in the store until `release`.

        Raises:
            OverloadedError: the shared memory is full of items in use.
        """
        key = hashlib.sha256(f"{self._fingerprint}{features.shape}".encode() + features.tobytes()).hexdigest()
        with self._lock:
            self._counts[Modality.AUDIO]["num_queries"] += 1
        return self._acquire(ItemQuery(key, Modality.AUDIO, None, {"features": features}, {}))

    def _prepare_anew(self, query: ItemQuery) -> StoredItem:
        features = query.arguments.get("features")
        if features is None:
            features = self._spectrogram(self._samples(query))
        path = self._store.path(query.key)
        layout, num_bytes = write_features(path, {FEATURES: features})
        item = MediaItem(
            modality=Modality.AUDIO,
            key=query.key,
            num_embeds=self._num_tokens(features),
            path=str(path),
            features=tuple(layout),
        )
        return StoredItem(item, "", (), {}, num_bytes)

    def _samples(self, query: ItemQuery) -> NDArray[np.float32]:
        media = query.media
        if media is None:
            raise MediaError("no sound of this uuid is there: send it with its data", code="media_not_cached")
        if media.form == "samples":
            return resample(np.frombuffer(media.data, np.float32), media.fields.get("rate", self._rate), self._rate)
        return decode_audio(media.data, self._rate, self.config)
