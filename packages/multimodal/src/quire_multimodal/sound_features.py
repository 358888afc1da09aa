"""Sounds of checkpoints whose processors need a package that Quire does without: torchaudio (Granite Speech, Fun-ASR)
or mistral-common (Voxtral, Voxtral Realtime). Their features and the text that stands for a sound, from the
checkpoint's settings.

Runs in a preparing process, as `quire_multimodal.processor` does.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import CheckpointError, Modality
from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError
from quire_multimodal.filter_banks import (
    granite_speech_features,
    kaldi_filter_bank,
    stacked_frames,
    whisper_features,
)
from quire_multimodal.fingerprint import read_config
from quire_multimodal.processor import EmbedsText, ItemProcessor, ProcessedItem
from quire_multimodal.spans import PromptFrame

__all__ = ["SoundFeatures", "has_sound_features"]

Samples = NDArray[np.float32]


class _Heard(NamedTuple):
    """What is made of a sound."""

    features: dict[str, NDArray[Any]]
    num_embeds: int
    num_tokens: int | None = None
    """Tokens that stand for it in the prompt; None for one for each embedding."""


class _Kind(NamedTuple):
    """How a model_type hears."""

    token: str
    """Stands for a sound in a chat template's text, and for each of its embeddings."""
    before: str
    """Token before the embeddings."""
    make: Callable[[Mapping[str, Any], Mapping[str, Any], Path], Callable[[Samples], _Heard]]
    """Settings of the feature extractor, config.json, and the folder -> samples at its rate to features."""


def has_sound_features(folder: Path | str) -> bool:
    """Whether a checkpoint's sounds are prepared here."""
    return read_config(Path(folder)).get("model_type") in _KINDS


class SoundFeatures(ItemProcessor):
    """Prepares the sounds of a checkpoint. Not thread-safe.

    Args:
        kind: How it hears.
        extract: Samples at its rate -> features.
        rate: Samples in a second.
        token_id: Of the tokens that take embeddings.
        config: Longest sounds that are decoded.
    """

    def __init__(
        self, kind: _Kind, extract: Callable[[Samples], _Heard], rate: int, token_id: int, config: MediaConfig
    ) -> None:
        self._kind, self._extract, self._token_id = kind, extract, token_id
        super().__init__(SimpleNamespace(_audio_processor=SimpleNamespace(sampling_rate=rate)), config)

    @classmethod
    def of_folder(
        cls, folder: Path | str, config: MediaConfig, embed_token_ids: Mapping[str, Sequence[int]]
    ) -> SoundFeatures:
        """What prepares the sounds of a checkpoint that `has_sound_features`.

        Raises:
            CheckpointError: config.json names no token for sounds, or the settings of its features cannot be used.
        """
        folder = Path(folder)
        values = read_config(folder)
        kind, settings = _KINDS[values["model_type"]], _settings(folder)
        named = [*embed_token_ids.get("audio", ()), values.get("audio_token_id"), values.get("audio_token_index")]
        token_id = next((each for each in named if isinstance(each, int)), None)
        if values["model_type"] in _BY_TEKKEN:
            token_id = _tekken_id(folder, kind.token)
        if token_id is None:
            raise CheckpointError(f"{folder}/config.json must have audio_token_id, the token that stands for sounds")
        found = cls(
            kind, kind.make(settings, values, folder), int(settings.get("sampling_rate", 16_000)), token_id, config
        )
        if found.unusable:
            raise CheckpointError(f"{folder}: {'; '.join(found.unusable.values())}")
        return found

    @property
    def frame(self) -> PromptFrame | None:
        return None

    def placeholder(self, modality: Modality) -> str | None:
        return self._kind.token if modality == Modality.AUDIO else None

    def process(self, modality: Modality, value: Any, arguments: Mapping[str, Any] | None = None) -> ProcessedItem:
        if arguments:
            raise MediaError(f"mm_processor_kwargs cannot be used with this model, got {sorted(arguments)}")
        try:
            features, num_embeds, num_tokens = self._extract(np.asarray(value, np.float32))
        except ValueError as error:
            raise MediaError(f"the {modality} cannot be heard: {error}", code="media_processing_failed") from error
        text = self._kind.before + self._kind.token * (num_embeds if num_tokens is None else num_tokens)
        return ProcessedItem(text, num_embeds, [self._token_id], features)

    def _possible_ways(self) -> list[tuple[str, str]]:
        return [("part", "np")]

    def _take_embeds_text(self, modality: Modality, item: ProcessedItem) -> None:
        if item.text == self._kind.before + self._kind.token * item.num_embeds:
            self.embeds_texts[modality] = EmbedsText(self._kind.before, self._kind.token, "", self._token_id)


def _settings(folder: Path) -> Mapping[str, Any]:
    """Settings of the feature extractor; empty where the checkpoint has none."""
    path = folder / "processor_config.json"
    inner = json.loads(path.read_text()) if path.is_file() else {}
    for name in ("audio_processor", "feature_extractor"):
        if isinstance(inner.get(name), Mapping):
            return dict(inner[name])
    path = folder / "preprocessor_config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _need(samples: Samples, least: int, rate: int) -> None:
    if len(samples) < least:
        raise ValueError(f"it must be at least {least / rate:g} s long, and has {len(samples) / rate:g} s")


def _granite_speech(settings: Mapping[str, Any], _: Mapping[str, Any], __: Path) -> Callable[[Samples], _Heard]:
    rate = int(settings.get("sampling_rate", 16_000))
    num_fft = int(settings.get("n_fft", 512))
    options = {
        "num_mel_bins": int(settings.get("feature_size") or settings.get("n_mels", 80)),
        "num_fft": num_fft,
        "frame_len": int(settings.get("win_length", 400)),
        "hop_len": int(settings.get("hop_length", 160)),
    }
    window = int(settings.get("projector_window_size", 15))
    queries = window // int(settings.get("projector_downsample_rate", 5))

    def extract(samples: Samples) -> _Heard:
        _need(samples, num_fft // 2 + 1, rate)
        features = granite_speech_features(samples, rate=rate, **options)
        return _Heard({"input_features": features[None]}, -(-len(features) // window) * queries)

    return extract


def _fun_asr_nano(settings: Mapping[str, Any], _: Mapping[str, Any], __: Path) -> Callable[[Samples], _Heard]:
    rate = int(settings.get("sampling_rate", 16_000))
    frame_ms = float(settings.get("frame_length", 25))
    hop_ms, window = float(settings.get("frame_shift", 10)), str(settings.get("window", "hamming"))
    num_mel_bins = int(settings.get("feature_size", 80))
    num_stacked, stride = int(settings.get("num_frames_lfr", 7)), int(settings.get("stride_lfr", 6))

    def extract(samples: Samples) -> _Heard:
        _need(samples, int(rate * frame_ms / 1000), rate)
        frames = kaldi_filter_bank(
            samples, rate=rate, num_mel_bins=num_mel_bins, frame_ms=frame_ms, hop_ms=hop_ms, window=window
        )
        features = stacked_frames(frames, num_stacked, stride)
        mask = np.ones((1, len(features)), np.int64)
        return _Heard({"input_features": features[None], "input_features_mask": mask}, len(features))

    return extract


def _voxtral(_: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> Callable[[Samples], _Heard]:
    """Whisper's features of whole windows; several tokens of a window become one embedding."""
    tower = values.get("audio_config") or {}
    num_positions = int(tower.get("max_source_positions", 1500))
    merged = int(tower.get("intermediate_size", 5120)) // int(tower.get("hidden_size", 1280))
    transformers = importlib.import_module("transformers")
    try:
        extractor = transformers.WhisperFeatureExtractor.from_pretrained(str(folder))
    except Exception as error:
        raise CheckpointError(f"{folder}: the feature extractor cannot be loaded: {error}") from error
    num_frames = 2 * num_positions

    def extract(samples: Samples) -> _Heard:
        multiple = num_frames * int(extractor.hop_length)
        options = {"sampling_rate": extractor.sampling_rate, "padding": True, "truncation": False}
        found = extractor(samples, pad_to_multiple_of=multiple, return_tensors="np", **options)["input_features"]
        windows = found.reshape(extractor.feature_size, -1, num_frames).transpose(1, 0, 2)
        features = np.ascontiguousarray(windows, np.float32)
        return _Heard({"input_features": features}, len(features) * num_positions // merged)

    return extract


def _voxtral_realtime(
    settings: Mapping[str, Any], values: Mapping[str, Any], folder: Path
) -> Callable[[Samples], _Heard]:
    """mistral-common's `TranscriptionRequest` of a whole recording: silence before it and behind it, and a token of the
    prompt for each embedding of the silence before it and of the time that the text is behind the sound."""
    streaming = _tekken(folder).get("audio") or {}
    num_left = int(streaming.get("streaming_n_left_pad_tokens", 32))
    num_delay = int(values.get("default_num_delay_tokens", 6))
    hop_len, num_fft = int(settings.get("hop_length", 160)), int(settings.get("n_fft", 400))
    rate, num_mel_bins = int(settings.get("sampling_rate", 16_000)), int(settings.get("feature_size", 128))
    token_len = int(values.get("audio_length_per_tok", 8)) * hop_len
    delay_ms = streaming.get("transcription_delay_ms")
    if delay_ms is not None and -(-int(delay_ms * rate / 1000) // token_len) != num_delay:
        raise CheckpointError(
            f"{folder}: tekken.json has a transcription_delay_ms of {delay_ms:g}, and config.json a "
            f"default_num_delay_tokens of {num_delay}, each {token_len / rate * 1000:g} ms: make them agree"
        )
    num_right = num_delay + 1 + _LONGEST_WORD_TOKENS

    def extract(samples: Samples) -> _Heard:
        behind = -len(samples) % token_len + num_right * token_len
        padded = np.pad(samples, (num_left * token_len, behind))
        features = whisper_features(
            padded,
            rate=rate,
            num_mel_bins=num_mel_bins,
            num_fft=num_fft,
            hop_len=hop_len,
            loudest=settings.get("global_log_mel_max", 1.5),
        )
        return _Heard({"input_features": features[None]}, len(padded) // token_len, num_left + num_delay)

    return extract


def _tekken(folder: Path) -> Mapping[str, Any]:
    """The checkpoint's tekken.json. Raises CheckpointError where it cannot be read."""
    try:
        content = json.loads((folder / "tekken.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/tekken.json cannot be read: {error}; fetch the file again") from error
    return content if isinstance(content, Mapping) else {}


def _tekken_id(folder: Path, token: str) -> int:
    """Id of a control token. Raises CheckpointError where tekken.json does not name it."""
    for entry in _tekken(folder).get("special_tokens") or ():
        if entry.get("token_str") == token:
            return int(entry["rank"])
    raise CheckpointError(f"{folder}/tekken.json names no {token} among its special_tokens")


_LONGEST_WORD_TOKENS = 10
"""Tokens that may still follow when the sound has ended, in mistral-common."""

_BY_TEKKEN = frozenset({"voxtral_realtime"})
"""Types whose token is named in tekken.json, and not in config.json."""

_KINDS: dict[str, _Kind] = {
    "fun_asr_nano": _Kind("<|object_ref_start|>", "", _fun_asr_nano),
    "granite_speech": _Kind("<|audio|>", "", _granite_speech),
    "granite_speech_plus": _Kind("<|audio|>", "", _granite_speech),
    "voxtral": _Kind("[AUDIO]", "[BEGIN_AUDIO]", _voxtral),
    "voxtral_realtime": _Kind("[STREAMING_PAD]", "", _voxtral_realtime),
}
