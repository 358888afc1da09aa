"""Causal self-attention as dense families have it, with what differs between them as arguments.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import OffsetRMSNorm, ProjectionRMSNorm, RMSNorm
from quire_models.layers.rope_and_cache import HeadNorms, RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope

__all__ = ["HeadNorms", "SelfAttention"]


class SelfAttention:
    """x [T, hidden_size] -> [T, hidden_size]: projections, norms of heads, rotation, attention, projection.

    Biases, heads, window and the rotated share of a head are those of the configuration.
    """

    __slots__ = (
        "_attend",
        "_clip",
        "_head_dim",
        "_norms",
        "_qkv",
        "_query_factor",
        "_stack_fields",
        "_write",
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    )

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        scope: Scope,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        rotated: bool = True,
        interleaved: bool = False,
        norms: HeadNorms | None = None,
        alibi_slopes: Tensor | None = None,
        clip: float | None = None,
        query_factor: Callable[[Tensor], Tensor] | None = None,
        chunk_tokens: int | None = None,
        out: str = "o_proj",
    ) -> None:
        """Args:
        scale: Factor of the scores; None for head_dim ** -0.5.
        soft_cap: See op `paged_attention`.
        rotated: Positions come by rotation in this layer.
        interleaved: See `Rotary`.
        alibi_slopes: See op `paged_attention`.
        clip: Queries, keys and values are kept within this distance from zero.
        query_factor: Positions [T] -> factors [T] of the queries.
        chunk_tokens: Tokens attend to those of their chunk only.
        out: Name of the last projection.
        """
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        self.q_proj = Linear(scope / "q_proj", hidden, query, bias=config.qkv_bias)
        self.k_proj = Linear(scope / "k_proj", hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(scope / "v_proj", hidden, kv, bias=config.qkv_bias)
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(scope / out, query, hidden, bias=config.attention_out_bias)
        self._head_dim = config.head_dim
        self._clip = clip
        self._query_factor = query_factor
        rotary = (
            Rotary(scope, config.rotary_dim, head_dim=config.head_dim, interleaved=interleaved) if rotated else None
        )
        self._attend = scope.attention(
            layer,
            scale=config.head_dim**-0.5 if scale is None else scale,
            sliding_window=config.sliding_windows[layer],
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            chunk_tokens=chunk_tokens,
        )
        self._write = RopeAndCache(self._attend, rotary, norms)
        self._norms = norms
        self._stack_fields: dict[str, Any] | None = None
        """Of `DecoderLayerWeights`, where op `decoder_stack` does all that there is to this attention."""
        if clip is None and query_factor is None and alibi_slopes is None and chunk_tokens is None:
            self._stack_fields = {
                "scale": config.head_dim**-0.5 if scale is None else scale,
                "soft_cap": soft_cap,
                "sliding_window": config.sliding_windows[layer],
                "rotation": 0 if rotated else None,
                "interleaved": interleaved,
            }

    def stack_weights(self, eps: float) -> dict[str, Any] | None:
        """Its part of `DecoderLayerWeights`, or None when a stack cannot compute it.

        Args:
            eps: Of the stack's norms.
        """
        weights, norms = stack_weights(q=self.q_proj, k=self.k_proj, v=self.v_proj, o=self.o_proj), self._norms
        if weights is None or self._stack_fields is None:
            return None
        fields = {**weights, **self._stack_fields}
        if norms is None:
            return fields
        kinds = (RMSNorm, OffsetRMSNorm) if norms.after_rotation else (RMSNorm, OffsetRMSNorm, ProjectionRMSNorm)
        of_heads = [norm.weight for norm in norms[:2] if isinstance(norm, kinds) and norm.eps == eps]
        if len(of_heads) < 2:
            return None
        query, key = of_heads
        return {**fields, "q_norm": query, "k_norm": key, "norm_after_rotation": norms.after_rotation}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = map(self._heads, self._qkv(x))
        query = self._write(query, key, value, cos, sin, batch)
        if self._query_factor is not None:
            query = query * self._query_factor(batch.positions)[:, None, None].to(query.dtype)
        return self.o_proj(self._attend.attend(query, batch).flatten(1))

    def _heads(self, projected: Tensor) -> Tensor:
        """[T, H * D] -> [T, H, D]."""
        if self._clip is not None:
            projected = projected.clamp(-self._clip, self._clip)
        return projected.view(len(projected), -1, self._head_dim)
