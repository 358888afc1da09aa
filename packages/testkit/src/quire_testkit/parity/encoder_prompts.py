"""What an encoder reads, for the whole engine and for Transformers: tokens, or a sound. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_interfaces import MediaSpan, Modality, PromptMedia
from quire_models import ModelConfig
from quire_models.spec import num_sound_tokens
from quire_testkit.parity.media_items import stored_item

__all__ = ["EncoderInput", "Spectrogram", "encoder_input"]

NUM_TOKENS = 45
"""Tokens that an encoder reads."""
NUM_SAMPLES = 16_960
"""Of a sound whose samples it reads: whole frames of 5 ms."""
NUM_FRAMES = 107
"""Of a sound that is read frame by frame."""


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """A sound for networks whose encoder reads no tokens."""

    features: Tensor
    """[mel bins, frames], float32; [frames, mel bins] or [1, samples] of a network that reads these."""
    num_tokens: int
    """What the encoder makes of it."""
    media: PromptMedia
    other: PromptMedia
    """Of strangers: another sound."""

    def __len__(self) -> int:
        return self.num_tokens


EncoderInput = Sequence[int] | Spectrogram


def encoder_input(config: ModelConfig, number: int, folder: Path) -> EncoderInput:
    """What the encoder of a network reads beside a prompt of its decoder; empty for a network without one.

    Args:
        number: Another one for another input.
        folder: Where files of sounds go, which stay as long as the input.
    """
    if not config.max_encoder_len:
        return []
    name = f"{config.architecture} {number}"
    if not config.encoder_takes_audio:
        return random.Random(name).choices(range(3, config.vocab_size), k=NUM_TOKENS)
    generator = torch.Generator().manual_seed(number)
    convolutions, bins = config.network.sound_convolutions, config.network.sound_bins
    if bins:
        shape, num_tokens = (NUM_FRAMES, bins), num_sound_tokens(convolutions, NUM_FRAMES)
    elif convolutions:
        shape, num_tokens = (1, NUM_SAMPLES), num_sound_tokens(convolutions, NUM_SAMPLES)
    else:  # Transformers' encoder reads sounds of its whole length only
        shape, num_tokens = (config.num_mel_bins, 2 * config.max_encoder_len), config.max_encoder_len
    sounds = [torch.randn(*shape, generator=generator) for _ in range(2)]
    media = []
    for index, features in enumerate(sounds):
        item = stored_item(folder / f"{name} {index}", Modality.AUDIO, {"input_features": features}, num_tokens)
        media.append(PromptMedia(spans=(MediaSpan(item=item, start=0, length=0, embeds=()),)))
    return Spectrogram(sounds[0], num_tokens, *media)
