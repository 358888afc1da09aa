"""SmolLM3 (Hugging Face 2025): Llama in which every fourth layer knows no positions."""

from __future__ import annotations

from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.smollm3.config import SmolLM3Config

__all__ = ["SmolLM3ForCausalLM"]


def make_layer(config: SmolLM3Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn", rotated=config.rotated_layers[layer]),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, inner, act=config.hidden_act, bias=config.mlp_bias),
    )


class SmolLM3ForCausalLM(DecoderLM):
    """The SmolLM3 network."""

    def __init__(self, config: SmolLM3Config, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
