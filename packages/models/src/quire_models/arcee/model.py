"""AFM (Arcee 2025): Llama with a squared ReLU instead of a gate."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["ArceeForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    names = ("up_proj", "down_proj")
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn"),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=MLP(scope / "mlp", hidden, inner, act=config.hidden_act, bias=config.mlp_bias, names=names),
    )


class ArceeForCausalLM(DecoderLM):
    """The AFM network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
