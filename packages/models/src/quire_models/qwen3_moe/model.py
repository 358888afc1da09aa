"""Qwen3-MoE (Yang et al. 2025): Qwen3 with routed experts and no shared one."""

from __future__ import annotations

from quire_models.layers.causal_lm import CausalLM
from quire_models.layers.decoder import PreNormDecoderLayer
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_models.qwen2_moe.model import make_moe
from quire_models.qwen3.model import Qwen3Attention

__all__ = ["Qwen3MoeForCausalLM"]


def make_qwen3_moe_layer(config: MoEConfig, layer: int, scope: Scope) -> PreNormDecoderLayer:
    """One decoder layer, with experts or without."""
    attention = Qwen3Attention(config, layer, scope / "self_attn")
    moe = make_moe(config, scope / "mlp") if config.sparse_layers[layer] else None
    return PreNormDecoderLayer(config, scope, attention, first=layer == 0, mlp=moe)


class Qwen3MoeForCausalLM(CausalLM):
    """The Qwen3-MoE network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_qwen3_moe_layer)
