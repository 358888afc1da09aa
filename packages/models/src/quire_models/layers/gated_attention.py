"""Self-attention whose result is gated (Qiu et al. 2025, arXiv:2505.06708), with normalised queries and keys.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import head_norms
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import SelfAttentionSpec
from quire_ops import AttentionWeights, QuantizedTokens, ops

__all__ = ["GatedAttention"]


class GatedAttention:
    """x [T, hidden_size] -> [T, hidden_size]; the query projection brings a gate beside each head's query."""

    def __init__(self, spec: SelfAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        """
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear.of(scope, each) for each in spec.projections())
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        norms = head_norms(spec, scope)
        assert norms is not None
        self._norms = norms
        self._head_dim = spec.head_dim
        self._rotary = Rotary(scope, spec.rotary_dim)
        self._gate = scope.op(ops.sigmoid_and_mul)
        self._attend = scope.attention(index, scale=spec.scale)
        self.cache, self._scale = index, spec.scale

    def fused_weights(self) -> AttentionWeights | None:
        """The attention as data for op `decoder_stack`, or None when that op cannot compute it."""
        weights: dict[str, Any] | None = stack_weights(q=self.q_proj, k=self.k_proj, v=self.v_proj, o=self.o_proj)
        query, key = self._norms.query, self._norms.key
        if weights is None or not isinstance(query, OffsetRMSNorm) or not isinstance(key, OffsetRMSNorm):
            return None
        return AttentionWeights(
            **weights,
            head_dim=self._head_dim,
            q_norm=query.weight,
            k_norm=key.weight,
            norm_eps=query.eps,
            scale=self._scale,
            rotates_in_steps=True,
            gated=True,
            kv_scale=self._attend.kv_scale,
        )

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._qkv.layers

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        projected, key, value = self._qkv(x)
        query, gate = projected.unflatten(-1, (-1, 2 * self._head_dim)).chunk(2, dim=-1)  # [T, Hq, D]
        key, value = (each.unflatten(-1, (-1, self._head_dim)) for each in (key, value))  # [T, Hkv, D]
        query = self._rotary(self._norms.query(query), cos, sin)
        key = self._rotary(self._norms.key(key), cos, sin)
        attended = self._attend(query, key, value, batch)
        return self.o_proj(self._gate(gate.flatten(1), attended.flatten(1)))
