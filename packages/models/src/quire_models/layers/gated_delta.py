"""The gated delta net: projection, short convolution, delta rule, gated norm, projection.

Shape legend: T tokens of the step, Hk and Hv key and value heads, R value heads per key head, Dk and Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.convolution import ShortConvolution
from quire_models.layers.gated_norm import GatedNorm
from quire_models.layers.linear import Linear, unadapted_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import GatedDeltaSpec
from quire_ops import GatedDeltaWeights, QuantizedTokens, ops

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet:
    """x [T, hidden_size] -> [T, hidden_size] (Yang et al. 2024, arXiv:2412.06464, fig. 1)."""

    def __init__(self, spec: GatedDeltaSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the mixer itself.
        """
        self._spec, self.cache = spec, index
        hidden, heads = spec.hidden_size, spec.num_value_heads
        projections = [Linear.of(scope, each) for each in spec.projections()]
        self._projections = MergedLinear(scope, *projections)
        self.conv1d = ShortConvolution(scope / "conv1d", spec.conv_size, spec.conv_kernel, activation="silu")
        self._delta_rule = scope.op(ops.gated_delta_rule, key_head_dim=spec.key_head_dim)
        gate = ops.silu_and_mul if spec.output_gate == "silu" else ops.sigmoid_and_mul
        self.norm = GatedNorm(scope, spec.value_head_dim, spec.eps, before_gate=True, gate=gate)
        self.out_proj = Linear(scope / "out_proj", spec.value_size, hidden)
        self._a_log = scope.parameter("A_log", heads, dtype=torch.float32)
        self._dt_bias = scope.parameter("dt_bias", heads, dtype=torch.float32)
        self._fixed: tuple[Tensor, Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._fixed = (self._a_log.take(), self._dt_bias.take())

    def fused_weights(self) -> GatedDeltaWeights | None:
        """The mixer as data for op `decoder_stack`, or None when a linear method keeps other forms of its weights,
        or for another gate."""
        inputs = {str(i): layer for i, layer in enumerate(self._projections.layers)}
        in_proj, out_proj = unadapted_weights(**inputs), unadapted_weights(out_proj=self.out_proj)
        if in_proj is None or out_proj is None or self._spec.output_gate != "silu":
            return None
        spec, (a_log, dt_bias) = self._spec, self._fixed
        return GatedDeltaWeights(
            **out_proj,
            in_proj=tuple(in_proj.values()),
            by_key_head=len(in_proj) == 2,
            taps=self.conv1d.weight,
            a_log=a_log,
            dt_bias=dt_bias,
            key_heads=spec.num_key_heads,
            key_dim=spec.key_head_dim,
            value_dim=spec.value_head_dim,
            norm=self.norm.fused_weights(),
        )

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._projections.layers

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        spec = self._spec
        (conv_state, state), layout = batch.states_of_layer(self.cache)
        mixed, gate, a, b = self._project(x)
        mixed = self.conv1d(mixed, conv_state, layout)
        query, key, value = mixed.split([spec.key_size, spec.key_size, spec.value_size], dim=-1)
        out = self._delta_rule(
            query.unflatten(-1, (-1, spec.key_head_dim)),  # [T, Hk, Dk]
            key.unflatten(-1, (-1, spec.key_head_dim)),
            value.unflatten(-1, (-1, spec.value_head_dim)),  # [T, Hv, Dv]
            a,
            b,
            *self._fixed,
            state,
            layout,
        )
        return self.out_proj(self.norm(out, gate.view(out.shape)).flatten(1))

    def _project(self, x: Tensor | QuantizedTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side [T, conv_size]; gate [T, Hv * Dv]; decays and strengths [T, Hv]."""
        spec = self._spec
        if not spec.by_key_head:
            mixed, gate, a, b = self._projections(x)
            return mixed, gate, a, b
        values_per_key = spec.num_value_heads // spec.num_key_heads
        inner = values_per_key * spec.value_head_dim
        qkvz, ba = self._projections(x)
        groups = qkvz.unflatten(-1, (spec.num_key_heads, -1))  # [T, Hk, 2 Dk + 2 R Dv]
        query, key, value, gate = groups.split([spec.key_head_dim, spec.key_head_dim, inner, inner], dim=-1)
        mixed = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), dim=-1)
        b, a = ba.unflatten(-1, (spec.num_key_heads, -1)).split(values_per_key, dim=-1)
        return mixed, gate.flatten(1), a.flatten(1), b.flatten(1)
