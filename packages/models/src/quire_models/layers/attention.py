"""Causal self-attention, as a record says what differs between families.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.alibi import alibi_slopes
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import OffsetRMSNorm, ProjectionRMSNorm, RMSNorm, make_norm
from quire_models.layers.query_growth import QueryGrowth
from quire_models.layers.rope_and_cache import HeadNorms, RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import SelfAttentionSpec
from quire_ops import AttentionWeights, QuantizedTokens

__all__ = ["HeadNorms", "SelfAttention", "head_norms"]


class SelfAttention:
    """x [T, hidden_size] -> [T, hidden_size]: projections, norms of heads, rotation, attention, projection.

    What it has of these, and of which sizes, says its `SelfAttentionSpec`.
    """

    cache: int
    """Index of its cache among those of a batch."""

    __slots__ = (
        "_attend",
        "_clip",
        "_head_dim",
        "_norms",
        "_qkv",
        "_query_growth",
        "_sinks",
        "_sinks_parameter",
        "_stack_fields",
        "_write",
        "cache",
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    )

    def __init__(self, spec: SelfAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        """
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear.of(scope, each) for each in spec.projections())
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self._sinks_parameter = scope.parameter("sinks", spec.num_heads) if spec.sinks else None
        self._sinks: Tensor | None = None
        self._head_dim, self._clip = spec.head_dim, spec.clip
        self.cache = index
        self._query_growth = None if spec.query_growth is None else QueryGrowth(spec.query_growth, scope.device)
        rotary = None
        if spec.rope is not None:
            rotary = Rotary(scope, spec.rotary_dim, head_dim=spec.head_dim, interleaved=spec.interleaved)
        slopes = None if spec.alibi is None else alibi_slopes(spec.alibi, spec.num_heads).to(scope.device)
        self._attend = scope.attention(
            index,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            alibi_slopes=slopes,
            chunk_tokens=spec.chunk_tokens,
        )
        self._norms = head_norms(spec, scope)
        self._write = RopeAndCache(self._attend, rotary, self._norms)
        self._stack_fields: dict[str, Any] | None = None
        """Fields of `AttentionWeights`; None where this attention does more than op `decoder_stack`."""
        if all(each is None for each in (spec.clip, spec.query_growth, spec.chunk_tokens)):
            self._stack_fields = {
                "scale": spec.scale,
                "alibi_slopes": slopes,
                "soft_cap": spec.soft_cap,
                "sliding_window": spec.sliding_window,
                "rotation": 0 if rotary is not None else None,
                "interleaved": spec.interleaved,
            }
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._sinks = None if self._sinks_parameter is None else self._sinks_parameter.take()

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._qkv.layers

    def fused_weights(self) -> AttentionWeights | None:
        """The attention as data for op `decoder_stack`, or None when that op cannot compute it."""
        weights, norms = stack_weights(q=self.q_proj, k=self.k_proj, v=self.v_proj, o=self.o_proj), self._norms
        if weights is None or self._stack_fields is None:
            return None
        fields: dict[str, Any] = {
            **weights,
            **self._stack_fields,
            "head_dim": self._head_dim,
            "sinks": self._sinks,
            "kv_scale": self._attend.kv_scale,
            "rotates_in_steps": not self._write.is_fused,
        }
        if norms is None:
            return AttentionWeights(**fields)
        kinds = (RMSNorm, OffsetRMSNorm) if norms.after_rotation else (RMSNorm, OffsetRMSNorm, ProjectionRMSNorm)
        query, key = norms.query, norms.key
        if not isinstance(query, kinds) or not isinstance(key, kinds) or query.eps != key.eps:
            return None
        of_heads: dict[str, Any] = {"q_norm": query.weight, "k_norm": key.weight, "norm_eps": query.eps}
        return AttentionWeights(**fields, **of_heads, norm_after_rotation=norms.after_rotation)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = map(self._heads, self._qkv(x))
        query = self._write(query, key, value, cos, sin, batch)
        if self._query_growth is not None:
            query = query * self._query_growth(batch.positions)[:, None, None].to(query.dtype)
        return self.o_proj(self._attend.attend(query, batch, self._sinks).flatten(1))

    def _heads(self, projected: Tensor) -> Tensor:
        """[T, H * D] -> [T, H, D]."""
        if self._clip is not None:
            projected = projected.clamp(-self._clip, self._clip)
        return projected.view(len(projected), projected.shape[1] // self._head_dim, self._head_dim)


def head_norms(spec: SelfAttentionSpec, scope: Scope) -> HeadNorms | None:
    """Norms of queries and keys, or a factor of the keys (Falcon H1); None for neither.

    Args:
        scope: Scope of the attention.
    """
    if spec.q_norm is not None and spec.k_norm is not None:
        return HeadNorms(make_norm(spec.q_norm, scope), make_norm(spec.k_norm, scope), spec.norm_after_rotation)
    if spec.key_factor != 1.0:
        return HeadNorms(lambda query: query, lambda key: key * spec.key_factor)
    return None
