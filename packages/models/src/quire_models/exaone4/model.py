"""EXAONE 4 (LG AI Research 2025): norms behind the parts, normalised heads, full attention without positions."""

from __future__ import annotations

from quire_models.config import ModelConfig
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["Exaone4ForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer. Where some layers slide, those of full attention know no positions."""
    inner, hidden, eps = scope / "self_attn", config.hidden_size, config.rms_norm_eps
    norms = HeadNorms(
        RMSNorm(inner / "q_norm", config.head_dim, eps),
        RMSNorm(inner / "k_norm", config.head_dim, eps),
    )
    rotated = not any(config.sliding_windows) or config.sliding_windows[layer] is not None
    return SequentialBlock(
        mixer=SelfAttention(config, layer, inner, norms=norms, rotated=rotated),
        attention_out_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
        feed_forward_out_norm=RMSNorm(scope / "post_feedforward_layernorm", hidden, eps),
    )


class Exaone4ForCausalLM(DecoderLM):
    """The EXAONE 4 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
