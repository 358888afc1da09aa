"""Qwen3 (Yang et al. 2025): each query and key head is RMS-normalised before it is rotated, and no bias by default.

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
from quire_models.layers.norm import RMSNorm
from quire_models.layers.rope_and_cache import HeadNorms, RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import QuantizedTokens

__all__ = ["Qwen3Attention", "Qwen3ForCausalLM"]


class Qwen3Attention:
    """Causal self-attention with normalised queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, scope: Scope) -> None:
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        self.q_proj = Linear(scope / "q_proj", hidden, query, bias=config.qkv_bias)
        self.k_proj = Linear(scope / "k_proj", hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(scope / "v_proj", hidden, kv, bias=config.qkv_bias)
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(scope / "o_proj", query, hidden, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(scope / "q_norm", config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(scope / "k_norm", config.head_dim, config.rms_norm_eps)
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_windows[layer]
        self.attend = scope.attention(layer, scale=config.head_dim**-0.5, sliding_window=self.sliding_window)
        rotary = Rotary(scope, config.head_dim, head_dim=config.head_dim)
        self.write = RopeAndCache(self.attend, rotary, HeadNorms(self.q_norm, self.k_norm))

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
        return {
            **weights,
            "scale": self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "q_norm": self.q_norm.weight,
            "k_norm": self.k_norm.weight,
        }


def make_qwen3_layer(config: ModelConfig, layer: int, scope: Scope) -> PreNormDecoderLayer:
    """One decoder layer with `Qwen3Attention`."""
    attention = Qwen3Attention(config, layer, scope / "self_attn")
    return PreNormDecoderLayer(config, scope, attention, first=layer == 0)


class Qwen3ForCausalLM(CausalLM):
    """The Qwen3 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_qwen3_layer)
