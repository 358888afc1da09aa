"""Gemma (Gemma Team 2024): Llama with a scaled embedding, a GELU gate, and norm weights stored less one."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import PreNormBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope

__all__ = ["GemmaForCausalLM", "scaled_embedding"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> PreNormBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return PreNormBlock(
        input_norm=OffsetRMSNorm(scope / "input_layernorm", hidden, eps),
        attention=SelfAttention(config, layer, scope / "self_attn"),
        mlp_norm=OffsetRMSNorm(scope / "post_attention_layernorm", hidden, eps),
        mlp=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
    )


def scaled_embedding(x: Tensor) -> Tensor:
    """x [T, hidden_size] times the root of the hidden size, which is rounded to x's dtype first."""
    return x * x.new_tensor(x.shape[-1] ** 0.5)


class GemmaForCausalLM(DecoderLM):
    """The Gemma network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, OffsetRMSNorm)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The embedding, scaled."""
        return scaled_embedding(super().embed(batch))
