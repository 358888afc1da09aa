"""Self-attention whose result is gated (Qiu et al. 2025, arXiv:2505.06708), with normalised queries and keys.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import QuantizedTokens, ops

__all__ = ["GatedAttention"]


class GatedAttention:
    """x [T, hidden_size] -> [T, hidden_size]; the query projection brings a gate beside each head's query."""

    def __init__(self, config: ModelConfig, scope: Scope, cache: int) -> None:
        """Args:
        cache: Which cache of the batch is its own.
        """
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        self.q_proj = Linear(scope / "q_proj", hidden, 2 * query, bias=config.qkv_bias)
        self.k_proj = Linear(scope / "k_proj", hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(scope / "v_proj", hidden, kv, bias=config.qkv_bias)
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(scope / "o_proj", query, hidden, bias=config.attention_out_bias)
        self.q_norm = OffsetRMSNorm(scope / "q_norm", config.head_dim, config.rms_norm_eps)
        self.k_norm = OffsetRMSNorm(scope / "k_norm", config.head_dim, config.rms_norm_eps)
        self._head_dim = config.head_dim
        self._rotary = Rotary(scope, config.rotary_dim)
        self._gate = scope.op(ops.sigmoid_and_mul)
        self._attend = scope.attention(cache, scale=config.head_dim**-0.5)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._qkv.layers

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        projected, key, value = self._qkv(x)
        query, gate = projected.unflatten(-1, (-1, 2 * self._head_dim)).chunk(2, dim=-1)  # [T, Hq, D]
        key, value = (each.unflatten(-1, (-1, self._head_dim)) for each in (key, value))  # [T, Hkv, D]
        query = self._rotary(self.q_norm(query), cos, sin)
        key = self._rotary(self.k_norm(key), cos, sin)
        attended = self._attend(query, key, value, batch)
        return self.o_proj(self._gate(gate.flatten(1), attended.flatten(1)))
