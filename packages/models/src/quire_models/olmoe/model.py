"""OLMoE (Muennighoff et al. 2024): many small experts; queries and keys are normalised over all heads at once."""

from __future__ import annotations

from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.norm import ProjectionRMSNorm
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_models.qwen2_moe.model import make_moe

__all__ = ["OlmoeForCausalLM", "make_attention"]


def make_attention(config: MoEConfig, layer: int, scope: Scope) -> SelfAttention:
    """Attention with norms over whole projections."""
    eps = config.rms_norm_eps
    norms = HeadNorms(
        ProjectionRMSNorm(scope / "q_norm", config.query_size, eps),
        ProjectionRMSNorm(scope / "k_norm", config.kv_size, eps),
    )
    return SelfAttention(config, layer, scope, norms=norms)


def make_olmoe_layer(config: MoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = make_attention(config, layer, scope / "self_attn")
    return pre_norm_block(config, scope, attention, make_moe(config, scope / "mlp"))


class OlmoeForCausalLM(DecoderLM):
    """The OLMoE network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_olmoe_layer)
