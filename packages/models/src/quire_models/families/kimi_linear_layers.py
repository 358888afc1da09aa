"""Modules of Kimi Linear and of other networks with its delta attention.

Shape legend: T tokens of the step, H heads, D head dimension, R of a latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.kimi_linear import GatedLatentSpec, KimiDeltaSpec, UnrotatedLatentSpec
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_ops import PagedLayout, QuantizedTokens, ops

__all__ = ["GatedLatentAttention", "KimiDeltaAttention", "SplitConvolution", "UnrotatedLatentAttention"]


class SplitConvolution:
    """x [T, channels] -> [T, channels]: a short convolution and SiLU, whose taps are stored in several tensors."""

    def __init__(self, scope: Scope, channels: dict[str, int], taps: int) -> None:
        """Args:
        channels: Name of a tensor in this scope -> how many of the channels it is for, in their order.
        """
        self._convolve = scope.op(ops.causal_conv1d, taps=taps)
        self._parts = [(scope / name).parameter("weight", size, 1, taps) for name, size in channels.items()]
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        # Kernels read it tap by tap.
        self._weight = torch.cat([part.take()[:, 0] for part in self._parts]).t().contiguous().t()

    def __call__(self, x: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
        """`state` [num_blocks, taps - 1, channels]: see `quire_ops.recurrent`."""
        out: Tensor = self._convolve(x, self._weight, None, state, layout, activation="silu")
        return out


class KimiDeltaAttention:
    """x [T, hidden_size] -> [T, hidden_size] (arXiv:2510.26692, sec. 3)."""

    def __init__(self, spec: KimiDeltaSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the attention itself.
        """
        self._spec, self._index = spec, index
        inner = spec.inner_size
        self._projections = MergedLinear(scope, *(Linear.of(scope, each) for each in spec.projections()))
        self._second = [Linear.of(scope, each) for each in spec.second_projections()]
        self._convolve = SplitConvolution(
            scope, dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), inner), spec.conv_kernel
        )
        self._rule = scope.op(ops.channel_delta_rule)
        self._norm = RMSNorm(scope / "o_norm", spec.head_dim, spec.eps)
        self._gate = scope.op(ops.sigmoid_and_mul)
        self._out = Linear(scope / "o_proj", inner, spec.hidden_size)
        self._a_log = scope.parameter("A_log", *spec.a_log_shape, dtype=torch.float32)
        self._dt_bias = scope.parameter("dt_bias", inner, dtype=torch.float32)
        self._rate: Tensor
        """[H, 1]."""
        self._bias: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._rate, self._bias = self._a_log.take().flatten().exp()[:, None], self._dt_bias.take()

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._projections.layers

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        heads = self._spec.num_heads
        (conv_state, state), layout = batch.states_of_layer(self._index)
        *mixed, strength, decay, gate = self._projections(x)
        if self._second:
            decay, gate = self._second[0](decay), self._second[1](gate)
        mixed_qkv = self._convolve(torch.cat(mixed, dim=-1), conv_state, layout)
        query, key, value = mixed_qkv.unflatten(-1, (3, heads, -1)).unbind(1)  # [T, H, D]
        out = self._rule(query, key, value, self._log_decay(decay), torch.sigmoid(strength.float()), state, layout)
        return self._out(self._gate(gate.contiguous(), self._norm(out).flatten(1)))

    def _log_decay(self, decay: Tensor) -> Tensor:
        """[T, H, D] float32, at most 0."""
        raw, bound = (decay.float() + self._bias).unflatten(-1, (self._spec.num_heads, -1)), self._spec.lower_bound
        return -self._rate * F.softplus(raw) if bound is None else bound * torch.sigmoid(self._rate * raw)


def _as_it_is(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


class UnrotatedLatentAttention(LatentAttention):
    """x [T, hidden_size] -> [T, hidden_size], without positions."""

    def __init__(self, spec: UnrotatedLatentSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        self._rotate = _as_it_is  # type: ignore[assignment]  # in the place of a Rotary

    def fused_weights(self) -> None:
        """None: op `decoder_stack` rotates."""


class GatedLatentAttention(LatentAttention):
    """x [T, hidden_size] -> [T, hidden_size]; what a head attended to has a gate of one number."""

    def __init__(self, spec: GatedLatentSpec, index: int, scope: Scope) -> None:
        gate = Linear.of(scope, spec.gate())
        super().__init__(spec, index, scope, beside=(gate,))
        self._gate = scope.op(ops.sigmoid_and_mul)

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no gates here."""

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        cache, layout = batch.of_layer(self.cache)
        down, latent, gate = self._down(x)
        self._write(self._row(latent, cos, sin), cache, layout.slot_mapping, self._rank)
        query = self._queries(self._query_latent(down), cos, sin)
        attended = self._attend(query, cache, layout, scale=self._spec.scale, rank=self._rank)  # [T, H, R]
        rows = self._gate(gate.reshape(-1, 1), attended.flatten(0, 1))  # its value is linear in it
        return self._output(rows.view_as(attended))
