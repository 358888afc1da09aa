"""GLM-4 of 2024 (GLM Team 2024): Llama with biases, pairs of neighbours rotated in half of each head."""

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

__all__ = ["GlmForCausalLM"]


class GlmLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention = SelfAttention(config, layer, scope / "self_attn", interleaved=True)
        self.mlp_norm = RMSNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, batch)
        return x + self.mlp(self.mlp_norm(x))


class GlmForCausalLM(DecoderLM):
    """The GLM network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, GlmLayer, RMSNorm)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes gate and up apart."""
        inner = self.config.intermediate_size
        return split_rows(name, tensor, {"gate_up_proj": {"gate_proj": inner, "up_proj": inner}})
