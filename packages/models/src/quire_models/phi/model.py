"""Phi (Li et al. 2023; Phi-2): attention and feed-forward side by side behind one layer norm, half a head rotated."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.phi.config import PhiConfig

__all__ = ["PhiForCausalLM"]


class PhiLayer:
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: PhiConfig, layer: int, scope: Scope) -> None:
        inner, eps = scope / "self_attn", config.rms_norm_eps
        norms = None
        if config.qk_layernorm:
            query_norm = LayerNorm(inner / "q_layernorm", config.head_dim, eps)
            norms = HeadNorms(query_norm, LayerNorm(inner / "k_layernorm", config.head_dim, eps))
        self.norm = LayerNorm(scope / "input_layernorm", config.hidden_size, eps)
        self.attention = SelfAttention(config, layer, inner, norms=norms, out="dense")
        self.mlp = MLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, cos, sin, batch) + self.mlp(normed)


class PhiForCausalLM(DecoderLM):
    """The Phi network."""

    def __init__(self, config: PhiConfig, scope: Scope) -> None:
        super().__init__(config, scope, PhiLayer, LayerNorm, norm="final_layernorm", head_bias=True)
