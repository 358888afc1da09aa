"""Gemma (Gemma Team 2024): Llama with a scaled embedding, a GELU gate, and norm weights stored less one."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope

__all__ = ["GemmaForCausalLM", "scaled_embedding"]


class GemmaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = OffsetRMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention = SelfAttention(config, layer, scope / "self_attn")
        self.mlp_norm = OffsetRMSNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, batch)
        return x + self.mlp(self.mlp_norm(x))


def scaled_embedding(x: Tensor) -> Tensor:
    """x [T, hidden_size] times the root of the hidden size, which is rounded to x's dtype first."""
    return x * x.new_tensor(x.shape[-1] ** 0.5)


class GemmaForCausalLM(DecoderLM):
    """The Gemma network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, GemmaLayer, OffsetRMSNorm)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The embedding, scaled."""
        return scaled_embedding(super().embed(batch))
