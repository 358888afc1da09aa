"""Attention whose result is gated, of Muse Glimmer and Step 3.5.

Shape legend: T tokens of the step, H query heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.muse_glimmer import OutputGatedSpec
from quire_models.layers.attention import SelfAttention
from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["OutputGatedAttention"]


class OutputGatedAttention(SelfAttention):
    """x [T, hidden_size] -> [T, hidden_size]; what was attended to is multiplied by sigmoid(gate(x)), head by head, or
    number by number."""

    __slots__ = ("_gate_proj", "_multiply", "_per_head")

    def __init__(self, spec: OutputGatedSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._gate_proj, self._per_head = Linear.of(scope, spec.gate()), spec.per_head
        self._multiply = scope.op(ops.sigmoid_and_mul)

    @property
    def consumers(self) -> Sequence[Linear]:
        """None: the gate takes x, too, after the projections."""
        return ()

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no such gates."""

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = map(self._heads, self._qkv(x))
        query = self._write(query, key, value, cos, sin, batch)
        attended = self._attend.attend(query, batch, self._sinks)  # [T, H, D]
        gate = self._gate_proj(x)
        if self._per_head:
            gated = self._multiply(gate.reshape(-1, 1), attended.flatten(0, 1)).view(len(x), -1)
        else:
            gated = self._multiply(gate, attended.flatten(1))
        return self.o_proj(gated)
