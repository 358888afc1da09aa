"""The ways in which mixer, feed-forward network and norms stand in a decoder layer.

A layer takes and gives the residual stream in two parts, the last result and what it is still to be added to, so that
the addition is fused with the norm behind it (`AddNorm`), which may be in the next layer.

Shape legend: T tokens of the step, D rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.add_norm import AddNorm, consumers_of
from quire_models.layers.norm import RMSNorm
from quire_models.layers.one_row import OneRowLayer
from quire_ops import DecoderLayerWeights, ops

__all__ = [
    "DecoderLayer",
    "FusedLayer",
    "Mixer",
    "ParallelBlock",
    "PostLNBlock",
    "SequentialBlock",
    "layer_weights",
]

Map = Callable[[Any], Tensor]
"""x [T, hidden_size], or its `QuantizedTokens` for a part with `consumers` -> [T, hidden_size]."""


class Mixer(Protocol):
    """The part of a layer in which tokens meet others: attention, a recurrence, a convolution."""

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size], or its `QuantizedTokens` for a mixer with `consumers`; cos and sin [T, 1, D] of the
        layer's rotation -> [T, hidden_size]."""


class DecoderLayer(Protocol):
    """One layer of a `DecoderLM`."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """x and residual [T, hidden_size], whose sum is the residual stream, for the same two of the next layer. A
        residual of None is zero; another may be written over. cos and sin [T, 1, D] are of the layer's rotation."""


@runtime_checkable
class FusedLayer(Protocol):
    """A layer that op `decoder_stack` may compute."""

    def fused_weights(self) -> DecoderLayerWeights | None:
        """The layer as data, or None when the op cannot compute it."""


@runtime_checkable
class _Fusable(Protocol):
    """A part of a layer that op `decoder_stack` may compute."""

    def fused_weights(self) -> Any:
        """The part as data, or None when the op cannot compute it."""


def layer_weights(
    mixer: object, feed_forward: object, *, residual_factor: float = 1.0, parallel: bool = False, **norms: object
) -> DecoderLayerWeights | None:
    """A layer as data for op `decoder_stack`, or None when that op cannot compute all of its parts.

    Args:
        norms: Field of `DecoderLayerWeights` -> norm, None for none.
    """
    parts = {"mixer": mixer, "feed_forward": feed_forward, **norms}
    weights = {name: part.fused_weights() if isinstance(part, _Fusable) else None for name, part in parts.items()}
    if any(part is not None and weights[name] is None for name, part in parts.items()):
        return None
    cache: int = getattr(mixer, "cache", 0)
    return DecoderLayerWeights(**weights, cache=cache, residual_factor=residual_factor, parallel=parallel)


class SequentialBlock:
    """x + f * out(mixer(norm(x))), then x + f * out(feed_forward(norm(x))), where `norm` and `out` are norms of their
    own for each part.

    Any norm may be missing, and one of the two parts: Llama has norms before the parts, OLMo 2 behind them, Gemma 2
    both, and a layer of Mamba has no feed-forward network.
    """

    one_row: OneRowLayer | None
    """The layer of steps of one token, where a backend has ops for it. Once it is loaded."""

    __slots__ = (
        "attention_out_norm",
        "before_feed_forward",
        "before_mixer",
        "feed_forward",
        "feed_forward_out_norm",
        "mixer",
        "one_row",
        "residual_factor",
    )

    def __init__(
        self,
        *,
        mixer: Mixer | None = None,
        feed_forward: Map | None = None,
        input_norm: Map | None = None,
        attention_out_norm: Map | None = None,
        feed_forward_norm: Map | None = None,
        feed_forward_out_norm: Map | None = None,
        residual_factor: float = 1.0,
    ) -> None:
        """Args:
        input_norm: Norm of what the mixer takes.
        attention_out_norm: Norm of what the mixer gives, before it is added.
        feed_forward_norm: Norm of what the feed-forward network takes.
        feed_forward_out_norm: Norm of what the feed-forward network gives, before it is added.
        residual_factor: f.
        """
        self.mixer, self.feed_forward = mixer, feed_forward
        self.before_mixer = AddNorm(input_norm, consumers_of(mixer))
        self.before_feed_forward = AddNorm(feed_forward_norm, consumers_of(feed_forward))
        self.attention_out_norm, self.feed_forward_out_norm = attention_out_norm, feed_forward_out_norm
        self.residual_factor = residual_factor
        self.one_row = None
        if isinstance(input_norm, RMSNorm) and input_norm.scope.choose(ops.norm_linear).name != "reference":
            input_norm.scope.when_loaded(self._bind)

    def _bind(self) -> None:
        if self.attention_out_norm is None and self.feed_forward_out_norm is None and self.residual_factor == 1.0:
            norms = self.before_mixer.norm, self.before_feed_forward.norm
            self.one_row = OneRowLayer.bind(self.mixer, self.feed_forward, *norms)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        if self.one_row is not None and len(x) == 1 and not self.one_row.is_adapted:
            return self.one_row(x if residual is None else x + residual, cos, sin, batch), None
        if self.mixer is not None:
            normed, residual = self.before_mixer(x, residual)
            x = self.mixer(normed, cos, sin, batch)
            if self.attention_out_norm is not None:
                x = self.attention_out_norm(x)
            if self.residual_factor != 1.0:
                x = x * self.residual_factor
        if self.feed_forward is not None:
            normed, residual = self.before_feed_forward(x, residual)
            x = self.feed_forward(normed)
            if self.feed_forward_out_norm is not None:
                x = self.feed_forward_out_norm(x)
            if self.residual_factor != 1.0:
                x = x * self.residual_factor
        return x, residual

    def fused_weights(self) -> DecoderLayerWeights | None:
        """The layer as data for op `decoder_stack`, or None when that op cannot compute it."""
        return layer_weights(
            self.mixer,
            self.feed_forward,
            input_norm=self.before_mixer.norm,
            attention_out_norm=self.attention_out_norm,
            feed_forward_norm=self.before_feed_forward.norm,
            feed_forward_out_norm=self.feed_forward_out_norm,
            residual_factor=self.residual_factor,
        )


class ParallelBlock:
    """x + mixer(norm(x)) + feed_forward(norm(x)), with one norm for both parts or one for each (GPT-J, GPT-NeoX)."""

    __slots__ = ("_before", "feed_forward", "feed_forward_norm", "mixer")

    def __init__(
        self, *, mixer: Mixer, feed_forward: Map, input_norm: Map, feed_forward_norm: Map | None = None
    ) -> None:
        """Args:
        input_norm: Norm of what the mixer takes.
        feed_forward_norm: Norm of what the feed-forward network takes; None when it is the mixer's.
        """
        self._before = AddNorm(input_norm)
        self.mixer, self.feed_forward, self.feed_forward_norm = mixer, feed_forward, feed_forward_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        normed, total = self._before(x, residual)
        inner = normed if self.feed_forward_norm is None else self.feed_forward_norm(total)
        return self.feed_forward(inner), total + self.mixer(normed, cos, sin, batch)

    def fused_weights(self) -> DecoderLayerWeights | None:
        """The layer as data for op `decoder_stack`, or None when that op cannot compute it."""
        return layer_weights(
            self.mixer,
            self.feed_forward,
            input_norm=self._before.norm,
            feed_forward_norm=self.feed_forward_norm or self._before.norm,
            parallel=True,
        )


class PostLNBlock:
    """norm(x + mixer(x)), then norm(x + feed_forward(x)) (Vaswani et al. 2017, sec. 3.1)."""

    __slots__ = ("_after_feed_forward", "_after_mixer", "feed_forward", "mixer")

    def __init__(self, *, mixer: Mixer, feed_forward: Map, mixer_norm: Map, feed_forward_norm: Map) -> None:
        """Args:
        mixer_norm: Norm of the sum with what the mixer gives.
        feed_forward_norm: Norm of the sum with what the feed-forward network gives.
        """
        self.mixer, self.feed_forward = mixer, feed_forward
        self._after_mixer, self._after_feed_forward = AddNorm(mixer_norm), AddNorm(feed_forward_norm)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        x = x if residual is None else x + residual
        x, _ = self._after_mixer(self.mixer(x, cos, sin, batch), x)
        return self._after_feed_forward(self.feed_forward(x), x)[0], None
