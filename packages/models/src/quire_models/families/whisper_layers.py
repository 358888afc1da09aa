"""Modules that only Whisper has.

Shape legend: N inputs, M mel bins, F frames of an input, E tokens of all inputs, C width of the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.config import ModelConfig
from quire_models.families.whisper import WhisperSpec
from quire_models.layers.activations import activation
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.scope import Scope
from quire_models.towers.sound_tower import Convolution

__all__ = ["WhisperForConditionalGeneration"]


class WhisperForConditionalGeneration(EncoderDecoderLM):
    """The network, whose encoder reads spectrograms in place of tokens."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, WhisperSpec)
        self._convolutions = [Convolution(each, scope) for each in spec.convolutions]
        self._act = activation(scope, spec.act)
        self._positions: Tensor
        table = scope.parameter(f"{spec.encoder_positions}.weight", spec.max_encoder_len, spec.hidden_size)
        scope.when_loaded(lambda: setattr(self, "_positions", table.take()))

    def encoder_input(self, inputs: EncoderBatch) -> Tensor:
        """Spectrograms [M, F] -> [E, C], a token for every two frames.

        Raises:
            ValueError: an input is no spectrogram of this network, or has other tokens than it has frames for.
        """
        num_bins, longest = self._spec.num_mel_bins, 2 * self._spec.max_encoder_len
        for features, length in zip(inputs.features, inputs.lens, strict=True):
            if features.ndim != 2 or features.shape[0] != num_bins or features.shape[1] != 2 * length:
                raise ValueError(
                    f"the encoder reads spectrograms of {num_bins} bins and up to {longest} frames, two for each of "
                    f"{length} tokens, got {list(features.shape)}"
                )
        return torch.cat([self._read(each.to(self.dtype)) for each in inputs.features])

    def _read(self, features: Tensor) -> Tensor:
        """[M, F] -> [F / 2, C]."""
        x = features[None]
        for convolution in self._convolutions:
            x = self._act(convolution(x))
        return x[0].t() + self._positions[: x.shape[2]]

    @property
    def _spec(self) -> WhisperSpec:
        spec = self.config.network
        assert isinstance(spec, WhisperSpec)
        return spec
