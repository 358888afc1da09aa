"""Sarvam's large network (Sarvam AI 2026): latent attention as in DeepSeek-V2, experts as in Ling 2.0."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.families.bailing_moe import bailing_experts
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """The bias that helps to choose experts is on where the file does not say otherwise."""
    config = config.with_default("moe_router_enable_expert_bias", True).with_default("score_function", "sigmoid")
    sizes, attention = latent_attention(config)
    moe = bailing_experts(config, sizes, bias_name="gate.e_score_correction_bias")
    dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    step = config.integer("moe_layer_freq", default=1, minimum=1)
    sparse = [layer >= dense and (layer - dense) % step == 0 for layer in sizes.layers]
    return sizes.network(
        sizes.pre_norm(layer, attention, moe if has_experts else sizes.gated_mlp())
        for layer, has_experts in enumerate(sparse)
    )
