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
from quire_models.layers.linear import Linear, unadapted_weights
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import Mamba2Spec
from quire_ops import Mamba2Weights, QuantizedTokens, ops

__all__ = ["Mamba2Mixer"]


class Mamba2Mixer:
    """x [T, hidden_size] -> [T, hidden_size] (Dao & Gu 2024, arXiv:2405.21060, sec. 7)."""

    def __init__(self, spec: Mamba2Spec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the mixer itself.
        """
        self._spec, self.cache = spec, index
        self._factors = projection_factors(spec, scope)
        inputs = spec.inner_size + spec.conv_size + spec.num_heads
        self.in_proj = Linear(scope / "in_proj", spec.hidden_size, inputs, bias=spec.proj_bias)
        self.conv1d = ShortConvolution(
            scope / "conv1d", spec.conv_size, spec.conv_kernel, bias=spec.conv_bias, activation="silu"
        )
        self._scan = scope.op(ops.mamba2_scan)
        self.norm = GatedNorm(
            scope,
            spec.inner_size,
            spec.eps,
            groups=spec.num_groups if spec.normed else 0,
            before_gate=spec.norm_before_gate,
        )
        self.out_proj = Linear(scope / "out_proj", spec.inner_size, spec.hidden_size, bias=spec.proj_bias)
        self._a_log = scope.parameter("A_log", spec.num_heads, dtype=torch.float32)
        self._d = scope.parameter("D", spec.num_heads, dtype=torch.float32)
        self._dt_bias = scope.parameter("dt_bias", spec.num_heads, dtype=torch.float32)
        self._fixed: tuple[Tensor, Tensor, Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._fixed = (-self._a_log.take().exp(), self._d.take(), self._dt_bias.take())

    def fused_weights(self) -> Mamba2Weights | None:
        """The mixer as data for op `decoder_stack`, or None when that op cannot compute it."""
        matrices = unadapted_weights(in_proj=self.in_proj, out_proj=self.out_proj)
        if matrices is None or self._factors is not None:
            return None
        spec, (a, d, dt_bias) = self._spec, self._fixed
        return Mamba2Weights(
            **matrices,
            taps=self.conv1d.weight,
            conv_bias=self.conv1d.bias,
            a=a,
            d=d,
            dt_bias=dt_bias,
            dt_limit=spec.dt_limit,
            head_dim=spec.head_dim,
            num_groups=spec.num_groups,
            state_size=spec.state_size,
            norm=self.norm.fused_weights(),
        )

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layer that takes x."""
        return (self.in_proj,)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        spec = self._spec
        (conv_state, ssm_state), layout = batch.states_of_layer(self.cache)
        projected = self.in_proj(x)
        if self._factors is not None:
            projected = projected * self._factors
        gate, mixed, dt = projected.split([spec.inner_size, spec.conv_size, spec.num_heads], dim=-1)
        mixed = self.conv1d(mixed, conv_state, layout)
        group = spec.num_groups * spec.state_size
        inner, b, c = mixed.split([spec.inner_size, group, group], dim=-1)
        a, d, dt_bias = self._fixed
        out = self._scan(
            inner.unflatten(-1, (spec.num_heads, spec.head_dim)),  # [T, H, P]
            dt,
            a,
            b.unflatten(-1, (spec.num_groups, spec.state_size)),  # [T, G, N]
            c.unflatten(-1, (spec.num_groups, spec.state_size)),
            d,
            dt_bias,
            ssm_state,
            layout,
            dt_limit=spec.dt_limit,
        )
        return self.out_proj(self.norm(out.flatten(1), gate))


def projection_factors(spec: Mamba2Spec, scope: Scope) -> Tensor | None:
    """[outputs of the first projection]: a factor of each; None where there are none."""
    if not spec.factors:
        return None
    group = spec.num_groups * spec.state_size
    sizes = torch.tensor([spec.inner_size, spec.inner_size, group, group, spec.num_heads])
    factors = torch.tensor(spec.factors).repeat_interleave(sizes)
    return factors.to(dtype=scope.dtype, device=scope.device)
