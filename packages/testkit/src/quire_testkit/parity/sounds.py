"""Networks that hear and whose tokens come with their frames, as Transformers runs them: hidden states and tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire_models import ModelConfig

__all__ = ["oracle_tokens", "random_frames", "sound_states", "tell_apart", "token_ids_of"]

NUM_FRAMES = (107, 8, 61, 240)
"""Of the sounds that a network is verified by."""


def random_frames(config: ModelConfig, seed: int) -> list[Tensor]:
    """Frames [frames, mel bins] of some sounds, float32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, config.network.sound_bins, generator=generator) for length in NUM_FRAMES]


@torch.inference_mode()
def sound_states(oracle: Any, sounds: Sequence[Tensor]) -> list[Tensor]:
    """What the encoder makes of each sound, [tokens, hidden_size] float32."""
    return [oracle.encoder(each[None].to(oracle.dtype)).last_hidden_state[0].float() for each in sounds]


@torch.no_grad()
def tell_apart(oracle: Any, sounds: Sequence[Tensor]) -> None:
    """Change a random network so that it says something: what makes tokens of hidden states sees how these differ from
    their mean, many are blank, and hardly any stays at its frame for ever.

    Args:
        oracle: Its first layer behind the encoder is scaled, and the blank's bias is set.
        sounds: Frames [frames, mel bins] of sounds like those that it is to hear.
    """
    hidden = torch.cat([oracle.encoder(each[None]).last_hidden_state[0] for each in sounds])
    is_ctc = hasattr(oracle, "ctc_head")
    layer = oracle.ctc_head if is_ctc else oracle.encoder_projector
    layer.weight /= hidden.std()
    weight = layer.weight[..., 0] if is_ctc else layer.weight
    layer.bias.copy_(-(weight @ hidden.mean(0)))
    first = hidden @ weight.T + layer.bias
    blank = oracle.config.pad_token_id if is_ctc else oracle.config.blank_token_id
    head = oracle.ctc_head if is_ctc else oracle.joint.head
    if not is_ctc:
        oracle.decoder.decoder_projector.weight *= 2
        first = oracle.joint(oracle.decoder(torch.tensor([[blank]]))[0], first)
        head.bias -= first.mean(0)
        first = first - first.mean(0)
    classes, durations = first.split([oracle.config.vocab_size, first.shape[1] - oracle.config.vocab_size], dim=1)
    head.bias[blank] += _offset(classes, blank, 0.5) if is_ctc else _offset(classes, blank, 0.8) + 0.06
    if durations.shape[1]:
        head.bias[oracle.config.vocab_size] += _offset(durations, 0, 0.1) - 0.5


def _offset(logits: Tensor, index: int, share: float) -> Tensor:
    """What is to be added to a column of logits [N, columns] so that it is the largest in this share of rows."""
    others = logits.clone()
    others[:, index] = -torch.inf
    return (others.amax(1) - logits[:, index]).quantile(share) + 1e-3  # no tie in any row


@torch.inference_mode()
def oracle_tokens(oracle: Any, frames: Tensor) -> list[int]:
    """The tokens of a sound, frames [frames, mel bins]."""
    return token_ids_of(oracle, frames[None])


def token_ids_of(oracle: Any, features: Tensor, **inputs: Any) -> list[int]:
    """The tokens of one sound as its features were extracted: what `generate` gives, without blanks.

    Args:
        features: [1, frames, mel bins].
        **inputs: What else the network gets.
    """
    blank = getattr(oracle.config, "blank_token_id", None)
    if blank is None:
        classes = oracle.generate(input_features=features, **inputs)[0].tolist()
        return [token for token, _ in itertools.groupby(classes) if token != oracle.config.pad_token_id]
    own = {"decoder_start_token_id": blank, "max_new_tokens": oracle.max_symbols_per_step * features.shape[1]}
    if durations := getattr(oracle.config, "durations", ()):  # whose logits stand behind those of tokens
        own["suppress_tokens"] = [oracle.config.vocab_size + place for place in range(len(durations))]
    sequence = oracle.generate(input_features=features, **own, **inputs).sequences[0]
    return [token for token in sequence[1:].tolist() if token != blank]
