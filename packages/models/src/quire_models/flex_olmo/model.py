"""FlexOlmo (Shi et al. 2025): the layers of OLMo 2 with experts, which were trained apart from each other."""

from __future__ import annotations

from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_models.olmoe.model import make_attention
from quire_models.qwen2_moe.model import make_moe

__all__ = ["FlexOlmoForCausalLM"]


def make_flex_olmo_layer(config: MoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        mixer=make_attention(config, layer, scope / "self_attn"),
        attention_out_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=make_moe(config, scope / "mlp"),
        feed_forward_out_norm=RMSNorm(scope / "post_feedforward_layernorm", hidden, eps),
    )


class FlexOlmoForCausalLM(DecoderLM):
    """The FlexOlmo network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_flex_olmo_layer)
