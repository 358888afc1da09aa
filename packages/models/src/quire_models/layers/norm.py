"""Root-mean-square normalization, alone and fused with the addition of the residual."""

from __future__ import annotations

from torch import Tensor

from quire_models.layers.scope import Scope

__all__ = ["AddRMSNorm", "RMSNorm"]


class RMSNorm:
    """x [..., size] -> like x (Zhang & Sennrich 2019)."""

    __slots__ = ("_eps", "_norm", "_parameter", "weight")

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self._norm = scope.op("rms_norm")
        self._eps = eps
        self._parameter = scope.parameter("weight", size)
        self.weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weight = self._parameter.take()

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self.weight, self._eps)
        return out


class AddRMSNorm:
    """(x, residual) [N, size] each -> (norm(x + residual), x + residual). May write over `residual`."""

    __slots__ = ("_eps", "_norm", "_parameter", "weight")

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self._norm = scope.op("add_rms_norm")
        self._eps = eps
        self._parameter = scope.parameter("weight", size)
        self.weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weight = self._parameter.take()

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self._norm(x, residual, self.weight, self._eps)
        return out
