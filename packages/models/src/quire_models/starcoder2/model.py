"""StarCoder2 (Lozhkov et al. 2024): pre-norm with layer norms, biases, and a feed-forward network without a gate."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["Starcoder2ForCausalLM"]


class Starcoder2Layer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = LayerNorm(scope / "input_layernorm", hidden, eps)
        self.attention = SelfAttention(config, layer, scope / "self_attn")
        self.mlp_norm = LayerNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp = MLP(
            scope / "mlp",
            hidden,
            config.intermediate_size,
            act=config.hidden_act,
            bias=config.mlp_bias,
            names=("c_fc", "c_proj"),
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, batch)
        return x + self.mlp(self.mlp_norm(x))


class Starcoder2ForCausalLM(DecoderLM):
    """The StarCoder2 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, Starcoder2Layer, LayerNorm)
