"""What stands between a layer's projections and its attention: norms of heads, rotation, writing keys and values.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quire_attention import Attention, ForwardBatch
from quire_models.layers.norm import OffsetRMSNorm, RMSNorm
from quire_models.layers.rotary import Rotary

__all__ = ["HeadNorms", "RopeAndCache"]


class HeadNorms(NamedTuple):
    """Norms of the queries and keys, [T, H, D] -> [T, H, D]."""

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    after_rotation: bool = False


class RopeAndCache:
    """Norms and rotation of queries and keys, and the write of keys and values into the paged cache.

    One kernel where the attention backend has op `rope_and_write_kv` and the norms are RMS norms of each head.
    """

    __slots__ = ("_attention", "_fused_norms", "_is_fused", "_norms", "_rotary")

    def __init__(self, attention: Attention, rotary: Rotary | None, norms: HeadNorms | None = None) -> None:
        """Args:
        attention: Whose cache is written.
        rotary: Rotation of queries and keys; None for none.
        norms: Norms of queries and keys; None for none.
        """
        self._attention = attention
        self._rotary = rotary
        self._norms = norms
        self._fused_norms: tuple[RMSNorm | OffsetRMSNorm, RMSNorm | OffsetRMSNorm] | None = None
        self._is_fused = attention.rotates and rotary is not None and rotary.is_plain
        if norms is not None:
            query, key = norms.query, norms.key
            if (
                isinstance(query, RMSNorm | OffsetRMSNorm)
                and isinstance(key, RMSNorm | OffsetRMSNorm)
                and query.eps == key.eps
                and not norms.after_rotation
            ):
                self._fused_norms = (query, key)
            else:
                self._is_fused = False

    @property
    def is_fused(self) -> bool:
        """Whether it is one kernel."""
        return self._is_fused

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D]; cos and sin [T, 1, R] of the rotated dimensions -> the queries
        that attend, [T, Hq, D]."""
        if self._is_fused:
            if self._fused_norms is None:
                return self._attention.rope_and_write_kv(query, key, value, cos, sin, batch)
            of_query, of_key = self._fused_norms
            weights = {"query_norm": of_query.weight, "key_norm": of_key.weight}
            return self._attention.rope_and_write_kv(query, key, value, cos, sin, batch, **weights, eps=of_query.eps)
        norms = self._norms
        if norms is not None and not norms.after_rotation:
            query, key = norms.query(query), norms.key(key)
        if self._rotary is not None:
            query, key = self._rotary(query, cos, sin), self._rotary(key, cos, sin)
        if norms is not None and norms.after_rotation:
            query, key = norms.query(query), norms.key(key)
        self._attention.write(key, value, batch)
        return query
