"""GLM-4 of 2025 (0414): GLM with norms before and after each part."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_rows
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["Glm4ForCausalLM"]


class Glm4Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention = SelfAttention(config, layer, scope / "self_attn", interleaved=True)
        self.attention_norm = RMSNorm(scope / "post_self_attn_layernorm", hidden, eps)
        self.mlp_norm = RMSNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act)
        self.output_norm = RMSNorm(scope / "post_mlp_layernorm", hidden, eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(self.input_norm(x), cos, sin, batch))
        return x + self.output_norm(self.mlp(self.mlp_norm(x)))


class Glm4ForCausalLM(DecoderLM):
    """The GLM-4 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, Glm4Layer, RMSNorm)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes gate and up apart."""
        inner = self.config.intermediate_size
        return split_rows(name, tensor, {"gate_up_proj": {"gate_proj": inner, "up_proj": inner}})
