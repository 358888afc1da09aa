"""Helium (Kyutai 2025): Llama with neighbours rotated as pairs."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["HeliumForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn", interleaved=True),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, inner, act=config.hidden_act, bias=config.mlp_bias),
    )


class HeliumForCausalLM(DecoderLM):
    """The Helium network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
