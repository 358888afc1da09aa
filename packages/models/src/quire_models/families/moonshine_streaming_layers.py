"""Modules that only Moonshine Streaming has.

Shape legend: S samples of an input, F frames of an input, E tokens of all inputs, T tokens of one input, C width of the
encoder's stream.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.config import ModelConfig
from quire_models.families.moonshine_streaming import MoonshineStreamingSpec
from quire_models.layers.activations import activation
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope

__all__ = ["MoonshineStreaming"]

_VARIANCE_EPS = 1e-6


class MoonshineStreaming(EncoderDecoderLM):
    """The network, whose encoder reads samples in place of tokens."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, MoonshineStreamingSpec)
        self._frame_len, self._silu = spec.frame_len, activation(scope, "silu")
        self._strides = [each.stride for each in spec.sound_convolutions[1:]]
        self._projection = None if spec.projection is None else Linear.of(scope, spec.projection)
        embedder = scope / "model.encoder.embedder"
        parameters = {name: embedder.parameter(name, *shape) for name, shape in spec.embedder_shapes.items()}
        ((name, shape, *_),) = spec.positions.weights()
        table = scope.parameter(name, *shape)
        self._weights: dict[str, Tensor]
        self._positions: Tensor

        def finish() -> None:
            self._weights = {name: each.take() for name, each in parameters.items()}
            self._positions = table.take()

        scope.when_loaded(finish)

    def encoder_input(self, inputs: EncoderBatch) -> Tensor:
        """Samples [1, S] of each input -> [E, C].

        Raises:
            ValueError: an input has more channels than one, or other tokens than it has samples for.
        """
        parts = [self._embed(each) for each in inputs.features]
        if [len(part) for part in parts] != list(inputs.lens):
            raise ValueError(f"sounds of {[len(part) for part in parts]} tokens came as {list(inputs.lens)} tokens")
        return torch.cat(parts)

    def _embed(self, samples: Tensor) -> Tensor:
        """[1, S] -> [T, C]. Each frame is scaled by itself, in float32, and silence fills the last one."""
        if samples.ndim != 2 or samples.shape[0] != 1:
            raise ValueError(f"the encoder reads samples of one channel, [1, samples], got {list(samples.shape)}")
        frames = F.pad(samples[0].float(), (0, -samples.shape[1] % self._frame_len)).view(-1, self._frame_len)
        frames = frames - frames.mean(dim=1, keepdim=True)
        frames.mul_(torch.rsqrt(frames.square().mean(dim=1, keepdim=True) + _VARIANCE_EPS))
        compressed = frames.mul_(self._weights["comp.log_k"].float().exp()).asinh_().to(self.dtype)
        x = self._silu(F.linear(compressed, self._weights["linear.weight"])).t()[None]
        first, second = self._strides
        x = self._silu(self._convolve(x, "conv1", first))
        return self._convolve(x, "conv2", second)[0].t()

    def _convolve(self, x: Tensor, name: str, stride: int) -> Tensor:
        """[1, channels, F] -> [1, other channels, frames that are left]: none sees what is behind it."""
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.conv1d(F.pad(x, (weight.shape[2] - 1, 0)), weight, bias, stride=stride)

    def layer_by_layer(self, x: Tensor, lens: list[int]) -> Tensor:
        """All layers of the encoder and the norm behind them; then the decoder's positions of what it attends to, and
        the projection to its width."""
        x = super().layer_by_layer(x, lens) + torch.cat([self._positions[:length] for length in lens])
        return x if self._projection is None else self._projection(x)
