"""Sounds that a network's encoder reads in place of a prompt: what prepares them, and the prompts that bring them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import quire_multimodal  # names are loaded when they are used: a server of texts loads no numpy
import quire_speech
from quire_interfaces import CheckpointError, PreparedMedia, RenderedPrompt, RequestError, read_json
from quire_models.config import ModelConfig
from quire_models.spec import max_sound_samples, num_sound_tokens
from quire_multimodal import MediaConfig

if TYPE_CHECKING:
    from quire_multimodal import SpectrogramPreparer

__all__ = ["extractor_settings", "longest_sound_s", "render_sound_prompt", "sound_fields", "sound_preparer"]


class _Renderer(Protocol):
    def render_prompt(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, media: PreparedMedia | None = None
    ) -> RenderedPrompt: ...


def sound_preparer(config: MediaConfig, model: ModelConfig, folder: Path) -> SpectrogramPreparer:
    """What prepares sounds for a network whose encoder reads them: spectrograms of the whole length that it reads,
    frames, or samples.

    Args:
        folder: Of the checkpoint.

    Raises:
        CheckpointError: its feature extractor makes other frames than the network reads.
    """
    convolutions = model.network.sound_convolutions
    if model.network.sound_bins:
        return _frames_preparer(config, model, folder)
    if convolutions:
        settings, first = extractor_settings(folder), convolutions[0]
        fields: dict[str, Any] = {
            "least": max_sound_samples(convolutions, 0) + 1,
            "most": max_sound_samples(convolutions, model.network.max_encoder_len),
            "normalizes": bool(settings) and bool(settings.get("do_normalize", True)),
            "frame_len": first.stride if first.stride == first.width else 1,
            "drops_rest": bool(settings.get("return_attention_mask")),
        }
        return quire_multimodal.SpectrogramPreparer(
            config,
            partial(quire_speech.window_samples, **fields),
            rate=quire_speech.SAMPLES_PER_S,
            num_tokens=lambda samples: num_sound_tokens(convolutions, samples.shape[1]),
            name=f"samples {sorted(fields.items())}",
        )
    bins, tokens = model.num_mel_bins, model.network.max_encoder_len
    frames = 2 * tokens
    return quire_multimodal.SpectrogramPreparer(
        config,
        partial(quire_speech.window_log_mel, num_mel_bins=bins, num_frames=frames),
        rate=quire_speech.SAMPLES_PER_S,
        num_tokens=lambda _: tokens,
        name=f"log_mel {bins} {frames}",
    )


def _frames_preparer(config: MediaConfig, model: ModelConfig, folder: Path) -> SpectrogramPreparer:
    """Frames of NeMo's features, which fill the encoder at most."""
    network, settings = model.network, extractor_settings(folder)
    bins = network.sound_bins
    for name, own in (("feature_size", bins), ("sampling_rate", quire_speech.SAMPLES_PER_S)):
        if settings.get(name, own) != own:
            raise CheckpointError(
                f"{folder}: {name} of the feature extractor is {settings[name]}, and the network reads {own}"
            )
    max_frames = max_sound_samples(network.sound_convolutions, network.max_encoder_len)
    fields: dict[str, Any] = {
        "num_fft": int(settings.get("n_fft", 512)),
        "window_length": int(settings.get("win_length", 400)),
        "hop_length": int(settings.get("hop_length", 160)),
        "preemphasis": float(settings.get("preemphasis") or 0.0) if "preemphasis" in settings else 0.97,
    }
    return quire_multimodal.SpectrogramPreparer(
        config,
        partial(quire_speech.standardized_log_mel, num_mel_bins=bins, max_frames=max_frames, **fields),
        rate=quire_speech.SAMPLES_PER_S,
        num_tokens=lambda frames: num_sound_tokens(network.sound_convolutions, len(frames)),
        name=f"standardized_log_mel {bins} {max_frames} {sorted(fields.items())}",
    )


def extractor_settings(folder: Path) -> Mapping[str, Any]:
    """What a checkpoint says of its feature extractor; empty where it says nothing."""
    whole = folder / "processor_config.json"
    own = read_json(whole).get("feature_extractor") if whole.is_file() else None
    path = folder / "preprocessor_config.json"
    return own or (read_json(path) if path.is_file() else {})


def longest_sound_s(folder: Path, model: ModelConfig, num_tokens: int) -> float:
    """Seconds of the longest sound of which a network's encoder makes so many tokens; without end where it reads no
    samples, or frames of any number.

    Args:
        folder: Of the checkpoint, whose feature extractor says how far apart frames are.
        num_tokens: That the engine reads at most (`EngineInfo.max_encoder_len`).
    """
    convolutions = model.network.sound_convolutions
    if not convolutions:
        return math.inf
    step = int(extractor_settings(folder).get("hop_length", 160)) if model.network.sound_bins else 1
    return max_sound_samples(convolutions, num_tokens) * step / quire_speech.SAMPLES_PER_S


def sound_fields(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt dictionary with the media that stand in its `encoder_prompt`."""
    inner = prompt.get("encoder_prompt")
    if not isinstance(inner, Mapping) or not (inner.get("multi_modal_data") or inner.get("multi_modal_uuids")):
        return prompt
    names = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
    return {**prompt, **{name: inner[name] for name in names if inner.get(name) is not None}}


def render_sound_prompt(prompt: Mapping[str, Any], renderer: _Renderer, media: PreparedMedia) -> RenderedPrompt:
    """A prompt whose sound is what the encoder reads, and whose text or tokens are what the decoder begins with.

    Args:
        prompt: Its keys are known: `decoder_prompt` with an `encoder_prompt`, or `prompt` or `prompt_token_ids`.
        media: The sound.

    Raises:
        RequestError: there is text for the encoder, or two texts for the decoder.
    """
    inner = prompt.get("encoder_prompt")
    text = (inner.get("prompt") or inner.get("prompt_token_ids")) if isinstance(inner, Mapping) else inner
    if text:
        raise RequestError(
            "the encoder of this model reads a sound: leave the text of encoder_prompt empty, and give what the output "
            "begins with as decoder_prompt",
            param="encoder_prompt",
        )
    begun = prompt.get("decoder_prompt")
    if isinstance(begun, Mapping):
        begun = begun.get("prompt_token_ids") or begun.get("prompt")
    own = prompt.get("prompt_token_ids") or prompt.get("prompt")
    if begun and own:
        raise RequestError("decoder_prompt takes the place of prompt; leave one of them out", param="decoder_prompt")
    begun = begun or own
    rendered = RenderedPrompt(token_ids=[]) if not begun else renderer.render_prompt(begun, add_special_tokens=False)
    placed = media.place(())
    return RenderedPrompt(
        token_ids=[0] * sum(span.item.num_embeds for span in placed.spans),
        text=rendered.text,
        decoder_token_ids=list(rendered.token_ids),
        media=placed,
    )
