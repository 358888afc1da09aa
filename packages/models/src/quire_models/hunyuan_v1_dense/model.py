"""Hunyuan, dense (Tencent 2025): Llama whose query and key heads are normalised after they are rotated."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["HunYuanDenseV1ForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    inner, hidden, eps = scope / "self_attn", config.hidden_size, config.rms_norm_eps
    norms = HeadNorms(
        RMSNorm(inner / "query_layernorm", config.head_dim, eps),
        RMSNorm(inner / "key_layernorm", config.head_dim, eps),
        after_rotation=True,
    )
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, inner, norms=norms),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
    )


class HunYuanDenseV1ForCausalLM(DecoderLM):
    """The dense Hunyuan network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
