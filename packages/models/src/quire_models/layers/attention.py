"""Causal self-attention, with what differs between families as arguments.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from quire_ops import QuantizedTokens

__all__ = ["HeadNorms", "SelfAttention", "head_norms"]


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
        "_sinks",
        "_sinks_parameter",
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
        sinks: bool = False,
        in_features: int | None = None,
        out: str = "o_proj",
    ) -> None:
        """Args:
        scale: Factor of the scores; None for head_dim ** -0.5.
        soft_cap: Scores become cap * tanh(score / cap); None for no cap.
        rotated: Queries and keys of this layer are rotated by their position.
        interleaved: Neighbours are the pairs that are rotated, (2i, 2i + 1), not (i, i + rotary_dim / 2).
        norms: Norms of queries and keys; None for none.
        alibi_slopes: [Hq] float32: a score falls by so much for each token in between; None for none.
        clip: Queries, keys and values are kept within this distance from zero.
        query_factor: Positions [T] -> factors [T] of the queries.
        chunk_tokens: Tokens attend to those of their chunk only.
        sinks: Each head has a learned score that takes attention and gives nothing (gpt-oss).
        in_features: Width of x; None for the hidden size.
        out: Name of the last projection.
        """
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        inputs = in_features or hidden
        self.q_proj = Linear(scope / "q_proj", inputs, query, bias=config.qkv_bias)
        self.k_proj = Linear(scope / "k_proj", inputs, kv, bias=config.qkv_bias)
        self.v_proj = Linear(scope / "v_proj", inputs, kv, bias=config.qkv_bias)
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(scope / out, query, hidden, bias=config.attention_out_bias)
        self._sinks_parameter = scope.parameter("sinks", config.num_heads) if sinks else None
        self._sinks: Tensor | None = None
        self._head_dim = config.head_dim
        self._clip = clip
        self._query_factor = query_factor
        rotary = (
            Rotary(scope, config.rotary_dim, head_dim=config.head_dim, interleaved=interleaved) if rotated else None
        )
        scale = config.head_dim**-0.5 if scale is None else scale
        self._attend = scope.attention(
            layer,
            scale=scale,
            sliding_window=config.sliding_windows[layer],
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            chunk_tokens=chunk_tokens,
        )
        self._write = RopeAndCache(self._attend, rotary, norms)
        self._norms = norms
        self._stack_fields: dict[str, Any] | None = None
        """Fields of `DecoderLayerWeights`; None where this attention does more than op `decoder_stack`."""
        if clip is None and query_factor is None and alibi_slopes is None and chunk_tokens is None:
            self._stack_fields = {
                "scale": scale,
                "soft_cap": soft_cap,
                "sliding_window": config.sliding_windows[layer],
                "rotation": 0 if rotated else None,
                "interleaved": interleaved,
            }
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._sinks = None if self._sinks_parameter is None else self._sinks_parameter.take()

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._qkv.layers

    def stack_weights(self, eps: float) -> dict[str, Any] | None:
        """Fields of `DecoderLayerWeights`, or None when op `decoder_stack` cannot compute this attention.

        Args:
            eps: Epsilon that all norms of the stack share.
        """
        weights, norms = stack_weights(q=self.q_proj, k=self.k_proj, v=self.v_proj, o=self.o_proj), self._norms
        if weights is None or self._stack_fields is None:
            return None
        fields = {**weights, **self._stack_fields, "sinks": self._sinks}
        if norms is None:
            return fields
        kinds = (RMSNorm, OffsetRMSNorm) if norms.after_rotation else (RMSNorm, OffsetRMSNorm, ProjectionRMSNorm)
        of_heads = [norm.weight for norm in norms[:2] if isinstance(norm, kinds) and norm.eps == eps]
        if len(of_heads) < 2:
            return None
        query, key = of_heads
        return {**fields, "q_norm": query, "k_norm": key, "norm_after_rotation": norms.after_rotation}

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = map(self._heads, self._qkv(x))
        query = self._write(query, key, value, cos, sin, batch)
        if self._query_factor is not None:
            query = query * self._query_factor(batch.positions)[:, None, None].to(query.dtype)
        return self.o_proj(self._attend.attend(query, batch, self._sinks).flatten(1))

    def _heads(self, projected: Tensor) -> Tensor:
        """[T, H * D] -> [T, H, D]."""
        if self._clip is not None:
            projected = projected.clamp(-self._clip, self._clip)
        return projected.view(len(projected), projected.shape[1] // self._head_dim, self._head_dim)


def head_norms(
    config: ModelConfig,
    scope: Scope,
    *,
    names: tuple[str, str] = ("q_norm", "k_norm"),
    after_rotation: bool = False,
) -> HeadNorms:
    """RMS norms of each query and each key head.

    Args:
        scope: Scope of the attention.
        names: Names of both in the checkpoint.
        after_rotation: Heads are normalised after they are rotated, not before.
    """
    query, key = (RMSNorm(scope / name, config.head_dim, config.rms_norm_eps) for name in names)
    return HeadNorms(query, key, after_rotation)
