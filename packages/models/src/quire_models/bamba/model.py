"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, attention in some."""

from __future__ import annotations

from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import Mixer, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.recurrent_config import HybridConfig

__all__ = ["BambaForCausalLM"]


def make_layer(config: HybridConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer, with attention or Mamba-2."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    mixer: Mixer
    if config.attention_layers[layer]:
        mixer = SelfAttention(config, layer, scope / "self_attn")
    else:
        mixer = Mamba2Mixer(scope / "mamba", config.mixer, layer)
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=mixer,
        feed_forward_norm=RMSNorm(scope / "pre_ff_layernorm", hidden, eps),
        feed_forward=GatedMLP(
            scope / "feed_forward", hidden, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias
        ),
    )


class BambaForCausalLM(DecoderLM):
    """The Bamba network."""

    def __init__(self, config: HybridConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, norm="final_layernorm")
