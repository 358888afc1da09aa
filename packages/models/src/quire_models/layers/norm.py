"""Root-mean-square normalization and layer normalization, of the stream and of attention heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_models.layers.scope import Scope
from quire_models.spec import ConditionedNormSpec, NormSpec
from quire_ops import NormWeights, ops

__all__ = [
    "ConditionedRMSNorm",
    "FusableNorm",
    "HeadLayerNorm",
    "LayerNorm",
    "OffsetRMSNorm",
    "ProjectionRMSNorm",
    "RMSNorm",
    "WeightlessRMSNorm",
    "make_norm",
]


class RMSNorm:
    """x [..., size] -> like x (Zhang & Sennrich 2019)."""

    __slots__ = ("_norm", "_parameter", "eps", "scope", "weight")

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self.scope = scope
        self._norm = scope.op(ops.rms_norm)
        self.eps = eps
        self._parameter = scope.parameter("weight", size)
        self.weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weight = self._parameter.take()

    def fused_weights(self) -> NormWeights:
        """The norm as data for ops that compute several parts of a layer."""
        return NormWeights(weight=self.weight, eps=self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self.weight, self.eps)
        return out


class OffsetRMSNorm:
    """x [..., size] -> like x: an RMS norm whose weight is stored as its distance from one (Gemma), or from another
    number (PLaMo 3)."""

    __slots__ = ("_norm", "_offset", "_parameter", "eps", "weight")

    def __init__(self, scope: Scope, size: int, eps: float, offset: float = 1.0) -> None:
        self._norm = scope.op(ops.rms_norm)
        self._offset = offset
        self.eps = eps
        self._parameter = scope.parameter("weight", size)
        self.weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weight = self._parameter.take().float() + self._offset

    def fused_weights(self) -> NormWeights:
        """The norm as data for ops that compute several parts of a layer."""
        return NormWeights(weight=self.weight, eps=self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        # In float32: next to one, a bfloat16 weight would lose most of its digits.
        out: Tensor = self._norm(x.float(), self.weight, self.eps)
        return out.to(x.dtype)


class ConditionedRMSNorm(OffsetRMSNorm):
    """x [..., size] -> like x: an RMS norm whose weight has a factor of its own for each number, which depends on a
    condition that never changes: it is computed once, in float32 (see `ConditionedNormSpec`)."""

    __slots__ = ("_condition", "_first", "_second")

    def __init__(self, spec: ConditionedNormSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        super().__init__(scope / spec.name, spec.size, spec.eps)
        self._condition = spec.condition
        inner = scope / spec.condition_name
        self._first = (inner / "linear1").parameter("weight", spec.condition_size, spec.size)
        self._second = (inner / "linear2").parameter("weight", spec.size, spec.condition_size)

    def _finish(self) -> None:
        weight, first, second = (each.take().float() for each in (self._parameter, self._first, self._second))
        half = len(weight) // 2
        angles = self._condition * 10000.0 ** (torch.arange(half, dtype=torch.float32, device=weight.device) / -half)
        embedding = torch.cat((angles.cos(), angles.sin()))
        self.weight = weight * (1 + second @ torch.nn.functional.gelu(first @ embedding))


class ProjectionRMSNorm:
    """x [T, H, D] -> like x: an RMS norm over all heads at once (OLMo 2)."""

    __slots__ = ("_norm", "eps")

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self._norm = RMSNorm(scope, size, eps)
        self.eps = eps

    @property
    def weight(self) -> Tensor:
        """[H * D]."""
        return self._norm.weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.flatten(1)).view(x.shape)


class LayerNorm:
    """x [..., size] -> like x (Ba et al. 2016); weight and bias are there or not."""

    __slots__ = ("_bias", "_eps", "_norm", "_offset", "_parameters", "_weight")

    def __init__(
        self, scope: Scope, size: int, eps: float, *, weight: bool = True, bias: bool = True, offset: float = 0.0
    ) -> None:
        """Args:
        offset: What is to be added to the stored weight.
        """
        self._norm = scope.op(ops.layer_norm)
        self._eps = eps
        self._offset = offset
        self._parameters = (
            scope.parameter("weight", size) if weight else None,
            scope.parameter("bias", size) if bias else None,
        )
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        weight, bias = self._parameters
        self._weight = None if weight is None else weight.take()
        if self._weight is not None and self._offset:
            self._weight = self._weight + self._offset
        self._bias = None if bias is None else bias.take()

    def fused_weights(self) -> NormWeights:
        """The norm as data for ops that compute several parts of a layer."""
        return NormWeights(kind="layer", weight=self._weight, bias=self._bias, eps=self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self._weight, self._bias, self._eps)
        return out


FusableNorm = RMSNorm | OffsetRMSNorm | LayerNorm
"""Norms that are data for ops which compute several parts of a layer: they have `fused_weights`."""


class WeightlessRMSNorm:
    """x [T, H, D] -> like x: an RMS norm of each head without a weight (Llama 4)."""

    __slots__ = ("_eps", "_norm", "_ones")

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self._norm = scope.op(ops.rms_norm)
        self._ones = torch.ones(size, dtype=scope.dtype, device=scope.device)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x.contiguous(), self._ones, self._eps)
        return out


class HeadLayerNorm:
    """x [T, H, D] -> like x: a layer norm of each head with a weight of its own (Command-R+, StableLM 2)."""

    __slots__ = ("_norm", "_parameters", "_weight")

    def __init__(self, scope: Scope, num_heads: int, head_dim: int, eps: float, *, is_listed: bool) -> None:
        """Args:
        is_listed: The checkpoint has one tensor per head, not one tensor.
        """
        self._norm = LayerNorm(scope, head_dim, eps, weight=False, bias=False)
        if is_listed:
            each = [scope / "norms" / str(head) for head in range(num_heads)]
            self._parameters = [one.parameter("weight", head_dim) for one in each]
        else:
            self._parameters = [scope.parameter("weight", num_heads, head_dim)]
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        tensors = [parameter.take() for parameter in self._parameters]
        self._weight = tensors[0] if tensors[0].ndim == 2 else torch.stack(tensors)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x) * self._weight


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
    if isinstance(spec, ConditionedNormSpec):
        return ConditionedRMSNorm(spec, scope)
    if spec.offset:
        return OffsetRMSNorm(inner, spec.size, spec.eps, spec.offset)
    return RMSNorm(inner, spec.size, spec.eps)
