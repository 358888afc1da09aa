"""Modules that only IQuest Loop Coder has.

Shape legend: T tokens of the step, H query heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.families.iquest_loop_coder import LoopedLayerSpec
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.rope_and_cache import RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import SelfAttentionSpec
from quire_ops import ops

__all__ = ["FirstRunAttention", "LoopedLM", "LoopedLayer"]


class FirstRunAttention(SelfAttention):
    """x [T, hidden_size] -> [T, hidden_size], in the first run; and its parts, for the second."""

    __slots__ = ()

    def fused_weights(self) -> None:
        """None: op `decoder_stack` runs each layer once."""

    def project(self, x: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, key-value heads, D]."""
        query, key, value = map(self._heads, self._qkv(x))
        return query, key, value

    def read(self, query: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, H, D] -> [T, H, D]: attention to what the first run has kept."""
        return self._attend.attend(query, batch)


class LoopedLayer:
    """The second run of a layer."""

    first: SequentialBlock
    """The layer, as it runs first. Set by the network."""

    def __init__(self, spec: LoopedLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the gate.
        """
        (mixer,) = spec.mixers
        assert isinstance(mixer, SelfAttentionSpec)
        self._attention = scope.attention(index, scale=mixer.scale, sliding_window=mixer.sliding_window)
        self._write = RopeAndCache(self._attention, Rotary(scope, mixer.rotary_dim, head_dim=mixer.head_dim))
        self._multiply = scope.op(ops.sigmoid_and_mul)
        self._parameters = (
            scope.parameter("weight", spec.num_heads, spec.head_dim),
            scope.parameter("bias", spec.num_heads),
        )
        self._gate: tuple[Tensor, Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        weight, bias = self._parameters
        self._gate = (weight.take(), bias.take())

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        first = self.first
        normed, residual = first.before_mixer(x, residual)
        x = self._attend(normed, cos, sin, batch)
        normed, residual = first.before_feed_forward(x, residual)
        assert first.feed_forward is not None
        return first.feed_forward(normed), residual

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        attention = self.first.mixer
        assert isinstance(attention, FirstRunAttention)
        query, key, value = attention.project(x)
        query = self._write(query, key, value, cos, sin, batch)
        of_all, of_last = attention.read(query, batch), self._attention.attend(query, batch)  # [T, H, D]
        weight, bias = self._gate
        gate = ((query * weight).sum(-1) + bias).reshape(-1, 1)
        mixed = self._multiply(gate, of_all.flatten(0, 1)) + self._multiply(-gate, of_last.flatten(0, 1))
        return attention.o_proj(mixed.view(len(query), -1))


class LoopedLM(DecoderLM):
    """The network, whose layers run twice."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        half = len(self.layers) // 2
        for first, second in zip(self.layers[:half], self.layers[half:], strict=True):
            assert isinstance(first, SequentialBlock)
            assert isinstance(second, LoopedLayer)
            second.first = first
