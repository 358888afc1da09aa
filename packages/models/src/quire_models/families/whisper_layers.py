"""Modules that only Whisper has.

Shape legend: N inputs, M mel bins, F frames of an input, E tokens of all inputs, C width of the stream.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.config import ModelConfig
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.families.whisper import WhisperSpec
from quire_models.layers.activations import activation
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.fused_encoder import bind_encoder
from quire_models.layers.scope import Scope
from quire_models.towers.sound_tower import Convolution
from quire_ops import OpRequest, RunEncoder, ops
from quire_quantization import Int8GroupedLinear, W8A8Linear, linear_method

__all__ = ["WhisperForConditionalGeneration"]


class WhisperForConditionalGeneration(EncoderDecoderLM):
    """The network, whose encoder reads spectrograms in place of tokens."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = self._spec
        self._convolutions = [Convolution(each, scope) for each in spec.convolutions]
        self._act = activation(scope, spec.act)
        self._positions: Tensor
        table = scope.parameter(f"{spec.encoder_positions}.weight", spec.max_encoder_len, spec.hidden_size)
        scope.when_loaded(lambda: setattr(self, "_positions", table.take()))
        self._run_layers: RunEncoder | None = None
        """All layers of the encoder in one call; set once weights are loaded, where a backend takes them."""
        scope.when_loaded(self._bind)

    def encoder_scope(self, scope: Scope) -> Scope:
        """With `w8a8`, layers that run in one call round what they take in groups, which is closer and as fast."""
        if scope.linear_method.name != W8A8Linear.name or scope.tp_group is not None or scope.adapters is not None:
            return scope
        attention = self._spec.encoder_layers[0].mixers[0]
        assert isinstance(attention, EncoderAttentionSpec)
        if scope.choose(ops.encoder_stack, head_dim=attention.head_dim).name == "reference":
            return scope
        request = OpRequest(device=scope.device.type, dtype=scope.dtype)
        return dataclasses.replace(scope, linear_method=linear_method(Int8GroupedLinear.name, request))

    def _bind(self) -> None:
        layers = self.encoder_layers
        turns: list[int | None] = [None] * len(layers)
        self._run_layers = bind_encoder(
            self.encoder_scope(self._scope),
            self.config.hidden_size,
            layers,
            turns,
            self.encoder_biases(),
            self.encoder_norm,
        )

    def run_encoder(self, x: Tensor, lens: list[int]) -> Tensor:
        """All layers of the encoder and the norm behind them, in one call where a backend takes them."""
        return self.layer_by_layer(x, lens) if self._run_layers is None else self._run_layers(x, lens, ())

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
