"""OLMo 2 (OLMo Team 2024): norms stand behind attention and feed-forward, and over all heads of queries and keys."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import ProjectionRMSNorm, RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["Olmo2ForCausalLM", "PostNormLayer"]


class PostNormLayer:
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope) -> None:
        inner, eps = scope / "self_attn", config.rms_norm_eps
        norms = HeadNorms(
            ProjectionRMSNorm(inner / "q_norm", config.query_size, eps),
            ProjectionRMSNorm(inner / "k_norm", config.kv_size, eps),
        )
        self.attention = SelfAttention(config, layer, inner, norms=norms)
        self.attention_norm = RMSNorm(scope / "post_attention_layernorm", config.hidden_size, eps)
        self.mlp = GatedMLP(scope / "mlp", config.hidden_size, config.intermediate_size, act=config.hidden_act)
        self.mlp_norm = RMSNorm(scope / "post_feedforward_layernorm", config.hidden_size, eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(x, cos, sin, batch))
        return x + self.mlp_norm(self.mlp(x))


class Olmo2ForCausalLM(DecoderLM):
    """The OLMo 2 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, PostNormLayer, RMSNorm)
