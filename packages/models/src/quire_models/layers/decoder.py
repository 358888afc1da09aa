"""The pre-norm decoder layer that the Llama-like families share, around an attention of their own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import AddRMSNorm, RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["PreNormDecoderLayer"]

SelfAttention = Callable[[Tensor, Tensor, Tensor, ForwardBatch], Tensor]


class PreNormDecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); additions are fused into the norm that follows."""

    __slots__ = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(self, config: ModelConfig, scope: Scope, self_attn: SelfAttention, *, first: bool) -> None:
        """Args:
        first: This is the first layer: nothing is to be added before its norm.
        """
        norm = RMSNorm if first else AddRMSNorm
        self.input_layernorm = norm(scope / "input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = AddRMSNorm(
            scope / "post_attention_layernorm", config.hidden_size, config.rms_norm_eps
        )
        self.mlp = GatedMLP(
            scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        if isinstance(self.input_layernorm, RMSNorm):
            normed, residual = self.input_layernorm(x), x
        else:
            assert residual is not None
            normed, residual = self.input_layernorm(x, residual)
        attended = self.self_attn(normed, cos, sin, batch)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual
