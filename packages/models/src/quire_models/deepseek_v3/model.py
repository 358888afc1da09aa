"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts scored by sigmoids and chosen in groups (sec. 2.1)."""

from __future__ import annotations

from quire_models.deepseek_v2.config import LatentMoEConfig
from quire_models.glm4_moe.model import GroupedMoELM, make_feed_forward
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.scope import Scope

__all__ = ["DeepseekV3ForCausalLM"]


def make_layer(config: LatentMoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = LatentAttention(config, layer, scope / "self_attn")
    return pre_norm_block(config, scope, attention, make_feed_forward(config, layer, scope / "mlp"))


class DeepseekV3ForCausalLM(GroupedMoELM):
    """The network of DeepSeek-V3 and R1, and of Kimi K2."""

    def __init__(self, config: LatentMoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
