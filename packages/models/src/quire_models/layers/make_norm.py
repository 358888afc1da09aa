"""Norms from their records."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire_models.layers.norm import (
    HeadLayerNorm,
    LayerNorm,
    OffsetRMSNorm,
    ProjectionRMSNorm,
    RMSNorm,
    WeightlessRMSNorm,
)
from quire_models.layers.scope import Scope
from quire_models.spec import NormSpec

__all__ = ["make_norm"]


def make_norm(spec: NormSpec, scope: Scope) -> Callable[[Tensor], Tensor]:
    """x -> like x: the norm that a record describes, within this scope."""
    inner = scope / spec.name
    if spec.kind == "layer" and spec.num_heads:
        return HeadLayerNorm(inner, spec.num_heads, spec.size, spec.eps, is_listed=spec.is_listed)
    if spec.kind == "layer":
        weight, bias = spec.has_weight, spec.has_bias
        return LayerNorm(inner, spec.size, spec.eps, weight=weight, bias=bias, offset=spec.offset)
    if spec.over_heads:
        return ProjectionRMSNorm(inner, spec.size, spec.eps)
    if not spec.has_weight:
        return WeightlessRMSNorm(inner, spec.size, spec.eps)
    if spec.offset:
        assert spec.offset == 1.0
        return OffsetRMSNorm(inner, spec.size, spec.eps)
    return RMSNorm(inner, spec.size, spec.eps)
