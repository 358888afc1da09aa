"""Gemma 3, text (Gemma Team 2025): Gemma 2 with normalised heads and two rotations instead of soft caps."""

from __future__ import annotations

from quire_models.gemma2.model import Gemma2ForCausalLM, sandwich_block
from quire_models.gemma3_text.config import Gemma3Config
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope
from quire_models.rope_config import RopeConfig

__all__ = ["Gemma3ForCausalLM"]


def make_gemma3_layer(config: Gemma3Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer; its window, if any, is the configuration's."""
    inner = scope / "self_attn"
    norms = HeadNorms(
        OffsetRMSNorm(inner / "q_norm", config.head_dim, config.rms_norm_eps),
        OffsetRMSNorm(inner / "k_norm", config.head_dim, config.rms_norm_eps),
    )
    scale = config.query_pre_attn_scalar**-0.5
    attention = SelfAttention(config, layer, inner, scale=scale, soft_cap=config.attention_soft_cap, norms=norms)
    return sandwich_block(config, scope, attention)


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """The Gemma 3 text network."""

    config: Gemma3Config

    def __init__(self, config: Gemma3Config, scope: Scope) -> None:
        super().__init__(config, scope, make_gemma3_layer)

    def rope_of_layer(self, layer: int) -> RopeConfig:
        """Sliding layers have their own."""
        return self.config.rope if self.config.sliding_windows[layer] is None else self.config.local_rope
