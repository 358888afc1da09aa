"""Qwen3-MoE (Yang et al. 2025): Qwen3 with routed experts and no shared one."""

from __future__ import annotations

from quire_models.layers.attention import SelfAttention, head_norms
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_models.qwen2_moe.model import make_moe

__all__ = ["Qwen3MoeForCausalLM"]


def make_qwen3_moe_layer(config: MoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer, with experts or without."""
    inner = scope / "self_attn"
    attention = SelfAttention(config, layer, inner, norms=head_norms(config, inner))
    moe = make_moe(config, scope / "mlp") if config.sparse_layers[layer] else None
    return pre_norm_block(config, scope, attention, moe)


class Qwen3MoeForCausalLM(DecoderLM):
    """The Qwen3-MoE network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_qwen3_moe_layer)
