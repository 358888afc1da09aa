"""Ministral 3 (Mistral AI 2025): Mistral whose queries grow with the logarithm of their position (as in Llama 4)."""

from __future__ import annotations

from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.query_growth import QueryGrowth
from quire_models.layers.scope import Scope
from quire_models.ministral3.config import Ministral3Config

__all__ = ["Ministral3ForCausalLM"]


def make_layer(config: Ministral3Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    beta, context = config.query_scaling_beta, config.rope.original_max_position_embeddings

    factor = QueryGrowth(beta, context, config.max_model_len, scope.device) if beta else None
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn", query_factor=factor),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
    )


class Ministral3ForCausalLM(DecoderLM):
    """The Ministral 3 network."""

    def __init__(self, config: Ministral3Config, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
