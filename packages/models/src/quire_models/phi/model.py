"""Phi (Li et al. 2023; Phi-2): attention and feed-forward side by side behind one layer norm, half a head rotated."""

from __future__ import annotations

from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import ParallelBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.phi.config import PhiConfig

__all__ = ["PhiForCausalLM"]


def make_layer(config: PhiConfig, layer: int, scope: Scope) -> ParallelBlock:
    """One layer."""
    inner, eps = scope / "self_attn", config.rms_norm_eps
    norms = None
    if config.qk_layernorm:
        query_norm = LayerNorm(inner / "q_layernorm", config.head_dim, eps)
        norms = HeadNorms(query_norm, LayerNorm(inner / "k_layernorm", config.head_dim, eps))
    return ParallelBlock(
        input_norm=LayerNorm(scope / "input_layernorm", config.hidden_size, eps),
        mixer=SelfAttention(config, layer, inner, norms=norms, out="dense"),
        feed_forward=MLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act),
    )


class PhiForCausalLM(DecoderLM):
    """The Phi network."""

    def __init__(self, config: PhiConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, LayerNorm, norm="final_layernorm", head_bias=True)
