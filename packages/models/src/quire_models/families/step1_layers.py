"""Modules that only Step-1 has.

Shape legend: T tokens of the step, H query heads.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.step1 import RootAlibiSpec
from quire_models.layers.attention import SelfAttention, bloom_slopes
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["RootAlibiAttention"]


_TABLES: WeakValueDictionary[tuple[int, int, torch.device], Tensor] = WeakValueDictionary()
"""Those in use, which all layers of a network share."""


def root_biases(num_heads: int, max_distance: int, device: torch.device) -> Tensor:
    """[H, max_distance + 1] float32: what is added to a head's scores by the distance; equal arguments share it."""
    key = (num_heads, max_distance, device)
    table = _TABLES.get(key)
    if table is None:
        roots = torch.arange(max_distance + 1, dtype=torch.float32).sqrt()
        table = _TABLES[key] = (-bloom_slopes(num_heads)[:, None] * roots).to(device)
    return table


class RootAlibiAttention(SelfAttention):
    """x [T, hidden_size] -> [T, hidden_size]; a head's scores fall by its slope (Press et al. 2022) times the root of
    the distance."""

    __slots__ = ("_attend_with", "_bias", "_scale")

    def __init__(self, spec: RootAlibiSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._attend_with, self._scale = scope.op(ops.biased_paged_attention), spec.scale
        self._bias = root_biases(spec.num_heads, spec.max_distance, scope.device)

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows biases by the distance itself."""

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = map(self._heads, self._qkv(x))
        query = self._write(query, key, value, cos, sin, batch)
        cache, layout = batch.of_layer(self.cache)
        attended = self._attend_with(
            query, cache, layout, scale=self._scale, bias=self._bias, kv_scale=self._attend.kv_scale
        )
        return self.o_proj(attended.flatten(1))
