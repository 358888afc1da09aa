"""The Mamba mixer: projection, short convolution, selective scan, gate, projection.

Shape legend: T tokens of the step, C inner channels, N numbers of state per channel, R width of the time steps' source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.convolution import ShortConvolution
from quire_models.layers.linear import Linear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import Mamba1Spec
from quire_ops import QuantizedTokens, ops

__all__ = ["Mamba1Mixer"]


class Mamba1Mixer:
    """x [T, hidden_size] -> [T, hidden_size] (Gu & Dao 2023, arXiv:2312.00752, sec. 3.4)."""

    def __init__(self, spec: Mamba1Spec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the mixer itself.
        """
        self._spec, self._index = spec, index
        hidden, inner, numbers = spec.hidden_size, spec.inner_size, spec.state_size
        self.in_proj = Linear(scope / "in_proj", hidden, 2 * inner, bias=spec.proj_bias)
        self.conv1d = ShortConvolution(
            scope / "conv1d", inner, spec.conv_kernel, bias=spec.conv_bias, activation="silu"
        )
        self.x_proj = Linear(scope / "x_proj", inner, spec.dt_rank + 2 * numbers)
        self._norms = [
            _make_norm(scope, name, size, spec)
            for name, size in (("dt_layernorm", spec.dt_rank), ("b_layernorm", numbers), ("c_layernorm", numbers))
        ]
        self.dt_proj = Linear(scope / "dt_proj", spec.dt_rank, inner)
        self._scan = scope.op(ops.selective_scan)
        self._gate = scope.op(ops.silu_and_mul)
        self.out_proj = Linear(scope / "out_proj", inner, hidden, bias=spec.proj_bias)
        self._a_log = scope.parameter("A_log", inner, numbers, dtype=torch.float32)
        self._d = scope.parameter("D", inner, dtype=torch.float32)
        self._dt_bias = (scope / "dt_proj").parameter("bias", inner, dtype=torch.float32)
        self._fixed: tuple[Tensor, Tensor, Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._fixed = (-self._a_log.take().exp(), self._d.take(), self._dt_bias.take())

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layer that takes x."""
        return (self.in_proj,)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        spec = self._spec
        (conv_state, ssm_state), layout = batch.states_of_layer(self._index)
        inner, gate = self.in_proj(x).chunk(2, dim=-1)
        inner = self.conv1d(inner, conv_state, layout)
        parts = self.x_proj(inner).split([spec.dt_rank, spec.state_size, spec.state_size], dim=-1)
        dt, b, c = (norm(part) for norm, part in zip(self._norms, parts, strict=True))
        a, d, dt_bias = self._fixed
        out = self._scan(inner, self.dt_proj(dt), a, b, c, d, dt_bias, ssm_state, layout)
        return self.out_proj(self._gate(gate, out))


def _make_norm(scope: Scope, name: str, size: int, spec: Mamba1Spec) -> Callable[[Tensor], Tensor]:
    if spec.norms == "weighted":
        return RMSNorm(scope / name, size, spec.eps)
    if spec.norms == "plain":
        norm, weight = scope.op(ops.rms_norm), torch.ones(size, dtype=scope.dtype, device=scope.device)
        return lambda x: norm(x, weight, spec.eps)
    return lambda x: x
