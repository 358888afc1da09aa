"""The linear attention of Ling 2.5.

Shape legend: T tokens of the step, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.bailing_moe_v2_5 import RotatedLightningSpec
from quire_models.layers.activations import activation
from quire_models.layers.attention import bloom_slopes
from quire_models.layers.gated_norm import GatedNorm
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import make_norm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["RotatedLightning"]


class RotatedLightning:
    """x [T, hidden_size] -> [T, hidden_size]. Each head keeps S [D, D]: S_t = exp(-slope) S_{t-1} + v_t k_t^T, and
    gives S_t q_t / sqrt(D), by op `mamba2_scan` with one step size for all tokens: values go in, keys write, queries
    read."""

    def __init__(self, spec: RotatedLightningSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the attention itself.
        """
        self._spec, self._index = spec, index
        *taking, out = (Linear.of(scope, each) for each in spec.projections())
        self._projections, self._out = MergedLinear(scope, *taking), out
        self._act = activation(scope, "silu") if spec.has_silu else None
        self._norms = [make_norm(norm, scope) for norm in spec.head_norms]
        self._rotate = None if spec.rope is None else Rotary(scope, spec.rotary_dim)
        self._scan = scope.op(ops.mamba2_scan)
        self._norm = GatedNorm(
            scope,
            spec.inner_size,
            spec.eps,
            groups=spec.groups,
            before_gate=True,
            name="g_norm",
            gate=ops.sigmoid_and_mul,
        )
        self._decay = -(bloom_slopes(spec.num_heads) * (1 - spec.depth + 1e-5)).to(scope.device)
        self._zeros = torch.zeros(spec.num_heads, device=scope.device)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._projections.layers

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self._index)
        projected, gate = self._projections(x)
        projected = projected if self._act is None else self._act(projected)
        query, key, value = projected.unflatten(-1, (3, self._spec.num_heads, -1)).unbind(1)  # [T, H, D]
        if self._norms:
            query, key = (norm(part.contiguous()) for norm, part in zip(self._norms, (query, key), strict=True))
        if self._rotate is not None:
            query, key = self._rotate(query, cos, sin), self._rotate(key, cos, sin)
        query = query * self._spec.head_dim**-0.5
        steps = torch.zeros(query.shape[:2], dtype=query.dtype, device=query.device)  # the limits make them 1
        out = self._scan(
            value, steps, self._decay, key, query, self._zeros, self._zeros, state, layout, dt_limit=(1.0, 1.0)
        )
        return self._out(self._norm(out.flatten(1), gate.contiguous()))
