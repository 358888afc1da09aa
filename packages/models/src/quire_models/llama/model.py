"""Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024): grouped-query attention, rotary positions, SwiGLU."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope

__all__ = ["LlamaForCausalLM", "make_llama_layer"]


def make_llama_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    return pre_norm_block(config, scope, SelfAttention(config, layer, scope / "self_attn"))


class LlamaForCausalLM(DecoderLM):
    """The Llama network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_llama_layer)
