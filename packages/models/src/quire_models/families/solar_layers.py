"""Modules that only Solar has.

Shape legend: T tokens of the step.
"""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.families.solar import SkippingSpec
from quire_models.layers.blocks import DecoderLayer
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope

__all__ = ["SolarForCausalLM"]


class Skips:
    """What was kept of the stream [T, hidden_size] in a step, by the number of the pair of layer lists."""

    def __init__(self, spec: SkippingSpec) -> None:
        self._skips, self._share = spec.skips, spec.share
        self._kept: dict[int, Tensor] = {}
        self._last = max((layer for pair in spec.skips for layers in pair for layer in layers), default=-1)

    def takes_part(self, layer: int) -> bool:
        """Whether the stream before this layer is kept, or mixed."""
        return any(layer in kept or layer in mixed for kept, mixed in self._skips)

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        """The stream before a layer -> what the layer takes: it is kept first, then mixed."""
        for number, (kept, _) in enumerate(self._skips):
            if layer in kept:
                self._kept[number] = x.clone()
        for number, (_, mixed) in enumerate(self._skips):
            if layer in mixed:
                x = self._kept[number] * self._share + x * (1 - self._share)
        if layer == self._last:  # nothing is left for the next step
            self._kept.clear()
        return x


class SkippingLayer:
    """A layer before which the stream is kept or mixed."""

    def __init__(self, layer: DecoderLayer, number: int, skips: Skips) -> None:
        self._layer, self._number, self._skips = layer, number, skips

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        stream = self._skips(self._number, x if residual is None else x + residual)
        return self._layer(stream, None, cos, sin, batch)


class SolarForCausalLM(DecoderLM):
    """The Solar network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, SkippingSpec)
        skips = Skips(spec)
        for number, layer in enumerate(self.layers):
            if skips.takes_part(number):
                self.layers[number] = SkippingLayer(layer, number, skips)
