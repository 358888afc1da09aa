"""StarCoder2 (Lozhkov et al. 2024): pre-norm with layer norms, biases, and a feed-forward network without a gate."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["Starcoder2ForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    names = ("c_fc", "c_proj")
    return SequentialBlock(
        input_norm=LayerNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn"),
        feed_forward_norm=LayerNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=MLP(scope / "mlp", hidden, inner, act=config.hidden_act, bias=config.mlp_bias, names=names),
    )


class Starcoder2ForCausalLM(DecoderLM):
    """The StarCoder2 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, LayerNorm)
