"""The gated feed-forward network."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.scope import Scope

__all__ = ["GatedMLP"]


class GatedMLP:
    """x [T, size] -> [T, size]: down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    __slots__ = ("_act_and_mul", "down_proj", "gate_proj", "up_proj")

    def __init__(self, scope: Scope, size: int, inner: int, *, act: str, bias: bool = False) -> None:
        """Args:
        act: "silu" or "gelu".
        """
        self.gate_proj = Linear(scope / "gate_proj", size, inner, bias=bias)
        self.up_proj = Linear(scope / "up_proj", size, inner, bias=bias)
        self.down_proj = Linear(scope / "down_proj", inner, size, bias=bias)
        self._act_and_mul = scope.op(f"{act}_and_mul")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self._act_and_mul(self.gate_proj(x), self.up_proj(x)))

    def stack_weights(self) -> dict[str, Any] | None:
        """Its part of `DecoderLayerWeights`, or None when a linear method keeps other forms of its weights."""
        return stack_weights(gate=self.gate_proj, up=self.up_proj, down=self.down_proj)
