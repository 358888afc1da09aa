"""The norm behind a recurrent mixer, with its gate."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.layers.scope import Scope
from quire_ops import GatedNormWeights, Op, ops

__all__ = ["GatedNorm"]


class GatedNorm:
    """(x, gate) [T, size] each -> [T, size]: an RMS norm, over groups of channels, with a SiLU gate, or another,
    before or behind it (Mamba-2, arXiv:2405.21060, sec. 7)."""

    __slots__ = ("_before_gate", "_eps", "_gate", "_groups", "_norm", "_ones", "_parameter", "weight")

    def __init__(
        self,
        scope: Scope,
        size: int,
        eps: float,
        *,
        groups: int = 1,
        before_gate: bool = False,
        name: str = "norm",
        gate: Op[[Tensor, Tensor], Tensor] = ops.silu_and_mul,
    ) -> None:
        """Args:
        groups: Number of groups of channels that are normalised apart; 0 for no norm, only the gate.
        before_gate: The gate multiplies what is normalised; else the norm is over what is gated.
        name: Of the norm in the checkpoint.
        gate: Op of the gate; ops for several parts of a layer (`fused_weights`) have SiLU.
        """
        self._gate = scope.op(gate)
        self._norm = scope.op(ops.rms_norm)
        self._eps, self._groups, self._before_gate = eps, groups, before_gate
        self._parameter = (scope / name).parameter("weight", size) if groups else None
        self.weight: Tensor
        self._ones: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        if self._parameter is not None:
            self.weight = self._parameter.take()
            self._ones = torch.ones_like(self.weight[: self.weight.shape[0] // self._groups])

    def fused_weights(self) -> GatedNormWeights:
        """The norm as data for ops that compute several parts of a layer."""
        weight = None if self._parameter is None else self.weight
        return GatedNormWeights(weight=weight, groups=self._groups, before_gate=self._before_gate, eps=self._eps)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        if not self._before_gate:
            x = self._gate(gate, x)
        if self._groups == 1:
            x = self._norm(x, self.weight, self._eps)
        elif self._groups:
            x = self._norm(x.unflatten(-1, (self._groups, -1)), self._ones, self._eps).flatten(-2) * self.weight
        return self._gate(gate, x) if self._before_gate else x
