"""The pre-norm decoder layer that the Llama-like families share, around an attention of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.activation_quant import ActivationQuant
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import AddRMSNorm, RMSNorm
from quire_models.layers.scope import Scope
from quire_ops import DecoderLayerWeights, QuantizedTokens, ops

__all__ = ["PreNormDecoderLayer"]


class SelfAttention(Protocol):
    """The attention of a layer."""

    @property
    def consumers(self) -> Sequence[Linear]:
        """The layers that take x, if nothing else does: then it may come rounded for them. Else none."""

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size], normalised -> [T, hidden_size]."""

    def stack_weights(self) -> dict[str, Any] | None:
        """Its part of `DecoderLayerWeights`, or None when a stack cannot compute it."""


class FeedForward(Protocol):
    """What stands behind the attention of a layer."""

    @property
    def consumers(self) -> Sequence[Linear]:
        """See `SelfAttention`."""

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        """x [T, hidden_size], normalised -> [T, hidden_size]."""

    def stack_weights(self) -> dict[str, Any] | None:
        """Its part of `DecoderLayerWeights`, or None when a stack cannot compute it."""


class PreNormDecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); additions are fused into the norm that follows, and so
    is what rounds its result for the products behind it, where a backend has that."""

    __slots__ = ("_for_attention", "_for_mlp", "input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(
        self,
        config: ModelConfig,
        scope: Scope,
        self_attn: SelfAttention,
        *,
        first: bool,
        mlp: FeedForward | None = None,
    ) -> None:
        """Args:
        first: This is the first layer: nothing is to be added before its norm.
        mlp: None for a gated feed-forward network of the configuration's size.
        """
        norm = RMSNorm if first else AddRMSNorm
        self.input_layernorm = norm(scope / "input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = AddRMSNorm(
            scope / "post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self.mlp: FeedForward = mlp or GatedMLP(
            scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias
        )
        op = ops.add_rms_norm_quant
        self._for_attention = ActivationQuant(scope, op, () if first else self_attn.consumers)
        self._for_mlp = ActivationQuant(scope, op, self.mlp.consumers)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        normed: Tensor | QuantizedTokens
        if isinstance(self.input_layernorm, RMSNorm):
            normed, residual = self.input_layernorm(x), x
        else:
            assert residual is not None
            normed, residual = _add_and_norm(self.input_layernorm, x, residual, self._for_attention)
        attended = self.self_attn(normed, cos, sin, batch)
        normed, residual = _add_and_norm(self.post_attention_layernorm, attended, residual, self._for_mlp)
        return self.mlp(normed), residual

    def stack_weights(self) -> DecoderLayerWeights | None:
        """The layer as data, or None when a linear method keeps other forms of its weights."""
        attention, mlp = self.self_attn.stack_weights(), self.mlp.stack_weights()
        if attention is None or mlp is None:
            return None
        return DecoderLayerWeights(
            input_norm=self.input_layernorm.weight,
            feed_forward_norm=self.post_attention_layernorm.weight,
            **attention,
            **mlp,
        )


def _add_and_norm(
    norm: AddRMSNorm, x: Tensor, residual: Tensor, rounded: ActivationQuant[..., tuple[QuantizedTokens, Tensor]]
) -> tuple[Tensor | QuantizedTokens, Tensor]:
    """See `AddRMSNorm`; rounded where all that take it round it alike."""
    if rounded.rounding is None:
        return norm(x, residual)
    return rounded.function(x, residual, norm.weight, norm.eps, rounded.rounding)
