"""OLMo 2 (OLMo Team 2024): norms stand behind attention and feed-forward, and over all heads of queries and keys."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import ProjectionRMSNorm, RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["Olmo2ForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    inner, eps = scope / "self_attn", config.rms_norm_eps
    norms = HeadNorms(
        ProjectionRMSNorm(inner / "q_norm", config.query_size, eps),
        ProjectionRMSNorm(inner / "k_norm", config.kv_size, eps),
    )
    return SequentialBlock(
        mixer=SelfAttention(config, layer, inner, norms=norms),
        attention_out_norm=RMSNorm(scope / "post_attention_layernorm", config.hidden_size, eps),
        feed_forward=GatedMLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act),
        feed_forward_out_norm=RMSNorm(scope / "post_feedforward_layernorm", config.hidden_size, eps),
    )


class Olmo2ForCausalLM(DecoderLM):
    """The OLMo 2 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
