"""Modules that only Grok has.

Shape legend: T tokens of the step, E experts.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.grok import CappedRouterMoESpec, TemperedAttentionSpec
from quire_models.layers.activations import activation
from quire_models.layers.attention import SelfAttention
from quire_models.layers.moe import SparseMoE
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["CappedRouterMoE", "TemperedAttention"]


class TemperedAttention(SelfAttention):
    """x [T, hidden_size] -> [T, hidden_size]; the softmax of queries far from the beginning is sharper."""

    __slots__ = ("_attend_with", "_length", "_scale", "_soft_cap")

    def __init__(self, spec: TemperedAttentionSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        assert spec.soft_cap is not None
        self._attend_with, self._length = scope.op(ops.tempered_paged_attention), spec.temperature_len
        self._scale, self._soft_cap = spec.scale, spec.soft_cap

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no factors of capped scores."""

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = map(self._heads, self._qkv(x))
        query = self._write(query, key, value, cos, sin, batch)
        cache, layout = batch.of_layer(self.cache)
        # In float64 before: the last bit of torch's logarithms follows where in the step a number stands.
        factors = (batch.positions.double().clamp_min(self._length).log() / math.log(self._length)).float()
        attended = self._attend_with(
            query,
            cache,
            layout,
            scale=self._scale,
            soft_cap=self._soft_cap,
            factors=factors,
            kv_scale=self._attend.kv_scale,
        )
        return self.o_proj(attended.flatten(1))


class CappedRouterMoE(SparseMoE):
    """x [T, hidden_size] -> [T, hidden_size]: the experts that logits [T, E] choose once they are capped, and the
    network beside them."""

    __slots__ = ()

    def __init__(self, spec: CappedRouterMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        super().__init__(spec, scope)
        choice, cap, tanh = self.router.select, spec.router_cap, activation(scope, "tanh")

        def select(logits: Tensor) -> tuple[Tensor, Tensor]:
            return choice(tanh(logits / cap) * cap)

        self.router.select = select

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no caps of routers."""
