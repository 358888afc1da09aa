"""The Mamba-2 mixer: projection, short convolution, state space scan, gated norm, projection.

Shape legend: T tokens of the step, H heads, P channels of a head, G groups, N numbers of state per channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.convolution import ShortConvolution
from quire_models.layers.gated_norm import GatedNorm
from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope
from quire_models.mixer_shapes import Mamba2Shape
from quire_ops import QuantizedTokens, ops

__all__ = ["Mamba2Mixer"]


class Mamba2Mixer:
    """x [T, hidden_size] -> [T, hidden_size] (Dao & Gu 2024, arXiv:2405.21060, sec. 7)."""

    def __init__(self, scope: Scope, shape: Mamba2Shape, cache: int, *, factors: Tensor | None = None) -> None:
        """Args:
        cache: Which cache of the batch has its states.
        factors: Of the outputs of the first projection.
        """
        self._shape, self._cache, self._factors = shape, cache, factors
        inputs = shape.inner_size + shape.conv_size + shape.num_heads
        self.in_proj = Linear(scope / "in_proj", shape.hidden_size, inputs, bias=shape.proj_bias)
        self.conv1d = ShortConvolution(
            scope / "conv1d", shape.conv_size, shape.conv_kernel, bias=shape.conv_bias, activation="silu"
        )
        self._scan = scope.op(ops.mamba2_scan)
        self.norm = GatedNorm(
            scope,
            shape.inner_size,
            shape.eps,
            groups=shape.num_groups if shape.normed else 0,
            before_gate=shape.norm_before_gate,
        )
        self.out_proj = Linear(scope / "out_proj", shape.inner_size, shape.hidden_size, bias=shape.proj_bias)
        self._a_log = scope.parameter("A_log", shape.num_heads, dtype=torch.float32)
        self._d = scope.parameter("D", shape.num_heads, dtype=torch.float32)
        self._dt_bias = scope.parameter("dt_bias", shape.num_heads, dtype=torch.float32)
        self._fixed: tuple[Tensor, Tensor, Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._fixed = (-self._a_log.take().exp(), self._d.take(), self._dt_bias.take())

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layer that takes x."""
        return (self.in_proj,)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        shape = self._shape
        (conv_state, ssm_state), layout = batch.states_of_layer(self._cache)
        projected = self.in_proj(x)
        if self._factors is not None:
            projected = projected * self._factors
        gate, mixed, dt = projected.split([shape.inner_size, shape.conv_size, shape.num_heads], dim=-1)
        mixed = self.conv1d(mixed, conv_state, layout)
        group = shape.num_groups * shape.state_size
        inner, b, c = mixed.split([shape.inner_size, group, group], dim=-1)
        a, d, dt_bias = self._fixed
        out = self._scan(
            inner.unflatten(-1, (shape.num_heads, shape.head_dim)),  # [T, H, P]
            dt,
            a,
            b.unflatten(-1, (shape.num_groups, shape.state_size)),  # [T, G, N]
            c.unflatten(-1, (shape.num_groups, shape.state_size)),
            d,
            dt_bias,
            ssm_state,
            layout,
            dt_limit=shape.dt_limit,
        )
        return self.out_proj(self.norm(out.flatten(1), gate))
