"""Nemotron-4 and Minitron (Parmar et al. 2024): squared ReLU, layer norms whose weights are stored less one."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["NemotronForCausalLM"]


def make_norm(scope: Scope, size: int, eps: float) -> LayerNorm:
    """A layer norm whose weight is stored less one."""
    return LayerNorm(scope, size, eps, offset=1.0)


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    names = ("up_proj", "down_proj")
    return SequentialBlock(
        input_norm=make_norm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn"),
        feed_forward_norm=make_norm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=MLP(scope / "mlp", hidden, inner, act=config.hidden_act, bias=config.mlp_bias, names=names),
    )


class NemotronForCausalLM(DecoderLM):
    """The Nemotron network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, make_norm)
