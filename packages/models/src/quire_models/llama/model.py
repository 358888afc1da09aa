"""Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024): grouped-query attention, rotary positions, SwiGLU.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.causal_lm import CausalLM
from quire_models.layers.decoder import PreNormDecoderLayer
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.rope_and_cache import RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import QuantizedTokens

__all__ = ["LlamaAttention", "LlamaForCausalLM", "make_llama_layer"]


class LlamaAttention:
    """Causal self-attention; every projection may have a bias."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope, *, in_features: int | None = None) -> None:
        """Args:
        in_features: Width of the input; None for the hidden size.
        """
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        inputs = in_features or hidden
        self.q_proj = Linear(scope / "q_proj", inputs, query, bias=config.qkv_bias)
        self.k_proj = Linear(scope / "k_proj", inputs, kv, bias=config.qkv_bias)
        self.v_proj = Linear(scope / "v_proj", inputs, kv, bias=config.qkv_bias)
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(scope / "o_proj", query, hidden, bias=config.attention_out_bias)
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_windows[layer]
        rotary = Rotary(scope, config.rotary_dim, head_dim=config.head_dim)
        self.attend = scope.attention(layer, scale=config.head_dim**-0.5, sliding_window=self.sliding_window)
        self.write = RopeAndCache(self.attend, rotary)

    @property
    def consumers(self) -> Sequence[Linear]:
        """See `SelfAttention`."""
        return self.q_proj, self.k_proj, self.v_proj

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        query, key, value = (each.unflatten(1, (-1, self.head_dim)) for each in self._qkv(x))  # [T, Hq or Hkv, D]
        query = self.write(query, key, value, cos, sin, batch)
        attended = self.attend.attend(query, batch)
        return self.o_proj(attended.flatten(1))

    def stack_weights(self) -> dict[str, Any] | None:
        """See `SelfAttention`."""
        weights = stack_weights(q=self.q_proj, k=self.k_proj, v=self.v_proj, o=self.o_proj)
        if weights is None:
            return None
        return {**weights, "scale": self.head_dim**-0.5, "sliding_window": self.sliding_window}


def make_llama_layer(config: ModelConfig, layer: int, scope: Scope) -> PreNormDecoderLayer:
    """One decoder layer with `LlamaAttention`."""
    attention = LlamaAttention(config, layer, scope / "self_attn")
    return PreNormDecoderLayer(config, scope, attention, first=layer == 0)


class LlamaForCausalLM(CausalLM):
    """The Llama network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_llama_layer)
