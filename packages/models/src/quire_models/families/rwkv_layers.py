"""Modules that only RWKV-4 has.

Shape legend: T tokens of the step, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.rwkv import RwkvLayerSpec, RwkvMixingSpec
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_ops import PagedLayout, ops

__all__ = ["RwkvLayer", "TokenShift"]


class TokenShift:
    """x [T, C] -> for each name, x times its shares, and the token before times the rest (sec. 3.1.1)."""

    def __init__(self, scope: Scope, size: int, names: tuple[str, ...]) -> None:
        self._parameters = [scope.parameter(f"time_mix_{name}", 1, 1, size) for name in names]
        self._convolve = scope.op(ops.causal_conv1d, taps=2)
        # A convolution that takes the token before and nothing else, stored tap by tap as kernels read it.
        taps = torch.zeros(2, size, dtype=scope.dtype, device=scope.device)
        taps[0] = 1.0
        self._before = taps.t()
        self.shares: list[Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.shares = [parameter.take().flatten() for parameter in self._parameters]

    def __call__(self, x: Tensor, state: Tensor, layout: PagedLayout) -> list[Tensor]:
        before = self._convolve(x, self._before, None, state, layout, activation=None)
        return [x * share + before * (1 - share) for share in self.shares]


class RwkvLayer:
    """x + time_mixing(norm(x)), then x + channel_mixing(norm(x)); the first layer norms the embedding first."""

    def __init__(self, spec: RwkvLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the layer.
        """
        mixing = spec.mixers[0]
        assert isinstance(mixing, RwkvMixingSpec)
        assert spec.input_norm is not None
        assert spec.feed_forward_norm is not None
        hidden, size, inner = mixing.hidden_size, mixing.attention_size, mixing.intermediate_size
        self._index = index
        self.outer_norm = None if spec.outer_norm is None else make_norm(spec.outer_norm, scope)
        self.time_norm = AddNorm(make_norm(spec.input_norm, scope))
        self.channel_norm = AddNorm(make_norm(spec.feed_forward_norm, scope))
        time, channel = scope / "attention", scope / "feed_forward"
        self.time_shift = TokenShift(time, hidden, ("key", "value", "receptance"))
        self.key, self.value, self.receptance = (Linear(time / n, hidden, size) for n in ("key", "value", "receptance"))
        self.output = Linear(time / "output", size, hidden)
        self._weigh = scope.op(ops.sigmoid_and_mul)
        self._relu2 = activation(scope, "relu2")
        self._decay = time.parameter("time_decay", size, dtype=torch.float32)
        self._first = time.parameter("time_first", size, dtype=torch.float32)
        self._wkv = scope.op(ops.wkv)
        self.channel_shift = TokenShift(channel, hidden, ("key", "receptance"))
        self.channel_key = Linear(channel / "key", hidden, inner)
        self.channel_value = Linear(channel / "value", inner, hidden)
        self.channel_receptance = Linear(channel / "receptance", hidden, hidden)
        self.decay: Tensor
        self.first: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.decay, self.first = -self._decay.take().exp(), self._first.take()

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        (time_state, wkv_state, channel_state), layout = batch.states_of_layer(self._index)
        if self.outer_norm is not None:
            x = self.outer_norm(x)
        normed, x = self.time_norm(x, residual)
        key, value, receptance = self.time_shift(normed, time_state, layout)
        mixed = self._wkv(self.key(key), self.value(value), self.decay, self.first, wkv_state, layout)
        normed, x = self.channel_norm(self.output(self._weigh(self.receptance(receptance), mixed)), x)
        key, receptance = self.channel_shift(normed, channel_state, layout)
        inner = self.channel_value(self._relu2(self.channel_key(key)))
        weighed: Tensor = self._weigh(self.channel_receptance(receptance), inner)
        return weighed, x
