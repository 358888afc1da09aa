"""Qwen3 (Yang et al. 2025): each query and key head is RMS-normalised before it is rotated, and no bias by default."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention, head_norms
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope

__all__ = ["Qwen3ForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    inner = scope / "self_attn"
    return pre_norm_block(config, scope, SelfAttention(config, layer, inner, norms=head_norms(config, inner)))


class Qwen3ForCausalLM(DecoderLM):
    """The Qwen3 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
