"""Modules that only MiMo-V2 has.

Shape legend: T tokens of the step, H heads, D and V dimensions of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.mimo_v2_flash import NarrowValueSpec
from quire_models.layers.attention import SelfAttention
from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope

__all__ = ["NarrowValueAttention"]


class NarrowValueAttention(SelfAttention):
    """x [T, hidden_size] -> [T, hidden_size]; values get zeros behind them, up to the size of keys."""

    __slots__ = ("_value_dim", "_value_factor")

    def __init__(self, spec: NarrowValueSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._value_dim, self._value_factor = spec.value_dim, spec.value_factor

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._qkv.layers

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows values as wide as keys."""

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = self._qkv(x)
        narrow = value.unflatten(-1, (-1, self._value_dim)) * self._value_factor
        wide = F.pad(narrow, (0, self._head_dim - self._value_dim))
        query = self._write(self._heads(query), self._heads(key), wide, cos, sin, batch)
        attended = self._attend.attend(query, batch, self._sinks)  # [T, H, D]
        return self.o_proj(attended[..., : self._value_dim].flatten(1))
