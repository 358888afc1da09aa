"""Causal self-attention, as a record says what differs between families.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire_attention import Attention, ForwardBatch
from quire_models.layers.context_parallel import ContextParallelAttention
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import OffsetRMSNorm, ProjectionRMSNorm, RMSNorm, make_norm
from quire_models.layers.rope_and_cache import HeadNorms, RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.layers.stored_layouts import DimShard
from quire_models.mixer_spec import AlibiSpec, QueryGrowthSpec, SelfAttentionSpec
from quire_ops import AttentionWeights, QuantizedTokens, ops

__all__ = ["HeadNorms", "SelfAttention", "head_norms"]


class SelfAttention:
    """x [T, hidden_size] -> [T, hidden_size]: projections, norms of heads, rotation, attention, gate (Qiu et al. 2025,
    arXiv:2505.06708), projection.

    What it has of these, and of which sizes, says its `SelfAttentionSpec`.
    """

    cache: int
    """Index of its cache among those of a batch."""

    __slots__ = (
        "_attend",
        "_clip",
        "_gate",
        "_group",
        "_head_dim",
        "_head_sizes",
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
        heads = spec.heads
        self._group = None if heads is None else scope.tp_group
        self._head_sizes = () if heads is None else tuple(each * spec.head_dim for each in heads.query_sizes)
        """Width of what the heads of each rank attended to."""
        self._sinks_parameter = None
        if spec.sinks:
            own = None if heads is None else DimShard(0, heads.query_start, heads.num_heads)
            self._sinks_parameter = scope.parameter("sinks", spec.num_heads, shard=own)
        self._sinks: Tensor | None = None
        self._head_dim, self._clip = spec.head_dim, spec.clip
        self._gate = scope.op(ops.sigmoid_and_mul) if spec.gated else None
        self.cache = index
        self._query_growth = None if spec.query_growth is None else QueryGrowth(spec.query_growth, scope.device)
        rotary = None
        if spec.rope is not None:
            rotary = Rotary(scope, spec.rotary_dim, head_dim=spec.head_dim, interleaved=spec.interleaved)
        slopes = None
        if spec.alibi is not None:
            slopes = alibi_slopes(spec.alibi, spec.num_heads if heads is None else heads.num_heads)
            slopes = (slopes if heads is None else slopes[heads.dcp_query_heads].contiguous()).to(scope.device)
        if heads is not None:
            scope.head_shards[scope.prefix] = heads
        make_attention = scope.attention if spec.dcp_size == 1 else partial(ContextParallelAttention, scope, spec)
        self._attend: Attention = make_attention(
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
        if spec.dcp_size == 1 and all(x is None for x in (spec.clip, spec.query_growth, spec.chunk_tokens)):
            self._stack_fields = {
                "scale": spec.scale,
                "alibi_slopes": slopes,
                "soft_cap": spec.soft_cap,
                "sliding_window": spec.sliding_window,
                "rotation": 0 if rotary is not None else None,
                "interleaved": spec.interleaved,
                "gated": spec.gated,
            }
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._sinks = None if self._sinks_parameter is None else self._sinks_parameter.take()
        self._attend.int8_products = self.q_proj.rounds_tokens_to_int8

    @property
    def qkv(self) -> MergedLinear:
        """Queries, keys and values of x."""
        return self._qkv

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
            "int8_products": self._attend.int8_products,
            "rotates_in_steps": not self._write.is_fused,
            "rank_widths": self._head_sizes,
        }
        if norms is None:
            return AttentionWeights(**fields)
        kinds = (RMSNorm, OffsetRMSNorm) if norms.after_rotation else (RMSNorm, OffsetRMSNorm, ProjectionRMSNorm)
        query, key = norms.query, norms.key
        if not isinstance(query, kinds) or not isinstance(key, kinds) or query.eps != key.eps:
            return None
        of_heads: dict[str, Any] = {"q_norm": query.weight, "k_norm": key.weight, "norm_eps": query.eps}
        return AttentionWeights(**fields, **of_heads, norm_after_rotation=norms.after_rotation)

    def store(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> None:
        """Write keys and values of x [T, hidden_size], from which nothing attends."""
        query, key, value = map(self._heads, self._qkv(x))
        self._write(query, key, value, cos, sin, batch)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        return self.o_proj(self.attend(self._qkv(x), cos, sin, batch))

    def attend(self, projected: tuple[Tensor, ...], cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """What `qkv` makes of x -> [T, in_features of `o_proj`]; writes keys and values."""
        query, key, value = map(self._heads, projected)
        del projected  # the rotation's results take its place
        gate: Tensor | None = None
        if self._gate is not None:  # beside each head's query
            query, gate = query.unflatten(1, (-1, 2)).unbind(2)
        query = self._write(query, key, value, cos, sin, batch)
        if self._query_growth is not None:
            query = query * self._query_growth(batch.positions)[:, None, None].to(query.dtype)
        attended = self._attend.attend(query, batch, self._sinks).flatten(1)
        if self._gate is not None and gate is not None:
            attended = self._gate(gate.flatten(1), attended)
        if self._group is not None:
            attended = self._group.all_gather(attended.contiguous(), dim=-1, sizes=self._head_sizes)
        return attended

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


class QueryGrowth:
    """positions [T] int64 -> factors [T] float32 of their queries: 1 + scale * log(1 + (position + offset) // step)."""

    __slots__ = ("_factors", "_offset", "_step")

    def __init__(self, spec: QueryGrowthSpec, device: torch.device) -> None:
        # Looked up, since torch's logarithm of a position follows where in the step it stands.
        steps = (spec.max_positions + spec.offset) // spec.step + 1
        factors = [1 + spec.scale * math.log1p(i) for i in range(steps)]
        self._factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self._step, self._offset = spec.step, spec.offset

    def __call__(self, positions: Tensor) -> Tensor:
        return self._factors[(positions + self._offset) // self._step]


def alibi_slopes(spec: AlibiSpec, num_heads: int) -> Tensor:
    """[num_heads] float32: by how much a score falls for each token in between."""
    slopes = bloom_slopes(num_heads) if spec.kind == "bloom" else mpt_slopes(num_heads, spec.bias_max)
    slopes = slopes.bfloat16().float() if spec.is_bfloat16 else slopes
    return slopes if spec.factor == 1.0 else slopes * spec.factor


def bloom_slopes(num_heads: int) -> Tensor:
    """[num_heads] float32: 2^(-8/n), 2^(-16/n), ... for n heads, the largest power of two that there is room for; the
    others take every second slope of twice as many heads."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = _powers(whole, 8.0)
    return torch.cat((slopes, _powers(2 * whole, 8.0)[0 : 2 * (num_heads - whole) : 2]))


def mpt_slopes(num_heads: int, bias_max: float = 8.0) -> Tensor:
    """[num_heads] float32: the slopes of the next power of two, first every second one from the second."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = _powers(whole, bias_max)
    return slopes if whole == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


def _powers(num_heads: int, bias_max: float) -> Tensor:
    return 2.0 ** -(torch.arange(1, num_heads + 1, dtype=torch.float32) * (bias_max / num_heads))
