"""The gated delta net: projection, short convolution, delta rule, gated norm, projection.

Shape legend: T tokens of the step, Hk and Hv key and value heads, R value heads per key head, Dk and Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.delta_config import DeltaShape
from quire_models.layers.convolution import ShortConvolution
from quire_models.layers.gated_norm import GatedNorm
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.scope import Scope
from quire_ops import QuantizedTokens, ops

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet:
    """x [T, hidden_size] -> [T, hidden_size] (Yang et al. 2024, arXiv:2412.06464, fig. 1)."""

    def __init__(self, scope: Scope, shape: DeltaShape, cache: int, *, by_key_head: bool) -> None:
        """Args:
        cache: Which cache of the batch has its states.
        by_key_head: Two projections bring everything, key head by key head (Qwen3-Next), instead of four.
        """
        self._shape, self._cache = shape, cache
        hidden, heads = shape.hidden_size, shape.num_value_heads
        self._by_key_head = by_key_head
        if by_key_head:
            self.in_proj_qkvz = Linear(scope / "in_proj_qkvz", hidden, shape.conv_size + shape.value_size)
            self.in_proj_ba = Linear(scope / "in_proj_ba", hidden, 2 * heads)
            self._projections = MergedLinear(scope, self.in_proj_qkvz, self.in_proj_ba)
        else:
            self.in_proj_qkv = Linear(scope / "in_proj_qkv", hidden, shape.conv_size)
            self.in_proj_z = Linear(scope / "in_proj_z", hidden, shape.value_size)
            self.in_proj_b = Linear(scope / "in_proj_b", hidden, heads)
            self.in_proj_a = Linear(scope / "in_proj_a", hidden, heads)
            self._projections = MergedLinear(scope, self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        self.conv1d = ShortConvolution(scope / "conv1d", shape.conv_size, shape.conv_kernel, activation="silu")
        self._delta_rule = scope.op(ops.gated_delta_rule, key_head_dim=shape.key_head_dim)
        self.norm = GatedNorm(scope, shape.value_head_dim, shape.eps, before_gate=True)
        self.out_proj = Linear(scope / "out_proj", shape.value_size, hidden)
        self._a_log = scope.parameter("A_log", heads, dtype=torch.float32)
        self._dt_bias = scope.parameter("dt_bias", heads, dtype=torch.float32)
        self._fixed: tuple[Tensor, Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._fixed = (self._a_log.take(), self._dt_bias.take())

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._projections.layers

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        shape = self._shape
        (conv_state, state), layout = batch.states_of_layer(self._cache)
        mixed, gate, a, b = self._project(x)
        mixed = self.conv1d(mixed, conv_state, layout)
        query, key, value = mixed.split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        out = self._delta_rule(
            query.unflatten(-1, (-1, shape.key_head_dim)),  # [T, Hk, Dk]
            key.unflatten(-1, (-1, shape.key_head_dim)),
            value.unflatten(-1, (-1, shape.value_head_dim)),  # [T, Hv, Dv]
            a,
            b,
            *self._fixed,
            state,
            layout,
        )
        return self.out_proj(self.norm(out, gate.view(out.shape)).flatten(1))

    def _project(self, x: Tensor | QuantizedTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side [T, conv_size]; gate [T, Hv * Dv]; decays and strengths [T, Hv]."""
        shape = self._shape
        if not self._by_key_head:
            mixed, gate, a, b = self._projections(x)
            return mixed, gate, a, b
        values_per_key = shape.num_value_heads // shape.num_key_heads
        inner = values_per_key * shape.value_head_dim
        qkvz, ba = self._projections(x)
        groups = qkvz.unflatten(-1, (shape.num_key_heads, -1))  # [T, Hk, 2 Dk + 2 R Dv]
        query, key, value, gate = groups.split([shape.key_head_dim, shape.key_head_dim, inner, inner], dim=-1)
        mixed = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), dim=-1)
        b, a = ba.unflatten(-1, (shape.num_key_heads, -1)).split(values_per_key, dim=-1)
        return mixed, gate.flatten(1), a.flatten(1), b.flatten(1)
