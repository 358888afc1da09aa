"""Modules that only Moonshine has.

Shape legend: S samples of an input, F frames of an input, E tokens of all inputs, C width of the stream.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.config import ModelConfig
from quire_models.families.moonshine import MoonshineSpec
from quire_models.layers.activations import activation
from quire_models.layers.decoder_lm import rotary_tables
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.scope import Scope

__all__ = ["MoonshineForConditionalGeneration"]

_NORM_EPS = 1e-5


class MoonshineForConditionalGeneration(EncoderDecoderLM):
    """The network, whose encoder reads samples in place of tokens."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec, encoder = self._spec, scope / "model.encoder"
        self._encoder_tables, self._encoder_rotations = rotary_tables(spec.encoder_layers, scope)
        self._tanh, self._gelu = activation(scope, "tanh"), activation(scope, "gelu_erf")
        self._strides = [each.stride for each in spec.sound_convolutions]
        self._convolutions: list[tuple[Tensor, Tensor | None]]
        self._norm: tuple[Tensor, Tensor]
        parameters = [
            (
                (encoder / f"conv{number}").parameter("weight", outputs, inputs, each.width),
                (encoder / f"conv{number}").parameter("bias", outputs) if number > 1 else None,
            )
            for number, (each, (inputs, outputs)) in enumerate(
                zip(spec.sound_convolutions, spec.convolution_sizes, strict=True), 1
            )
        ]
        norm = [(encoder / "groupnorm").parameter(name, spec.hidden_size) for name in ("weight", "bias")]

        def finish() -> None:
            self._convolutions = [(weight.take(), None if bias is None else bias.take()) for weight, bias in parameters]
            self._norm = (norm[0].take(), norm[1].take())

        scope.when_loaded(finish)

    def encoder_input(self, inputs: EncoderBatch) -> Tensor:
        """Samples [1, S] of each input -> [E, C].

        Raises:
            ValueError: an input is no sound of one channel, or has other tokens than it has samples for.
        """
        parts = [self._read(each) for each in inputs.features]
        if [len(part) for part in parts] != list(inputs.lens):
            raise ValueError(f"sounds of {[len(part) for part in parts]} tokens came as {list(inputs.lens)} tokens")
        return torch.cat(parts)

    def _read(self, samples: Tensor) -> Tensor:
        """[1, S] -> [F, C]. The first norm is over all frames and channels of the input."""
        if samples.ndim != 2 or samples.shape[0] != 1:
            raise ValueError(f"the encoder reads samples of one channel, [1, samples], got {list(samples.shape)}")
        x = samples.to(self.dtype)[None]
        for number, ((weight, bias), stride) in enumerate(zip(self._convolutions, self._strides, strict=True)):
            x = F.conv1d(x, weight, bias, stride=stride)
            x = self._gelu(x) if number else F.group_norm(self._tanh(x), 1, *self._norm, eps=_NORM_EPS)
        return x[0].t()

    def layer_by_layer(self, x: Tensor, lens: list[int]) -> Tensor:
        """All layers of the encoder and the norm behind them."""
        positions = torch.cat([torch.arange(length) for length in lens]).to(x.device)
        rotations = [table(positions, max(lens)) for table in self._encoder_tables]
        for layer, rotation in zip(self.encoder_layers, self._encoder_rotations, strict=True):
            x = layer(x, lens, None if rotation is None else rotations[rotation])
        return x if self.encoder_norm is None else self.encoder_norm(x)

    @property
    def _spec(self) -> MoonshineSpec:
        spec = self.config.network
        assert isinstance(spec, MoonshineSpec)
        return spec
