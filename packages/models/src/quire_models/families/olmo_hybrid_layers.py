"""Modules that only OLMo Hybrid has.

Shape legend: T tokens of the step, Hk and Hv key and value heads, Dk and Dv their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.kimi_linear_layers import SplitConvolution
from quire_models.families.olmo_hybrid import OlmoDeltaSpec
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["OlmoDeltaNet"]

NORM_EPS = 1e-5
"""Whatever config.json says of the other norms."""


class OlmoDeltaNet:
    """x [T, hidden_size] -> [T, hidden_size] (arXiv:2412.06464, fig. 1)."""

    def __init__(self, spec: OlmoDeltaSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the mixer itself.
        """
        self._spec, self._index = spec, index
        self._projections = MergedLinear(scope, *(Linear.of(scope, each) for each in spec.projections()))
        self._convolve = SplitConvolution(scope, spec.channels(), spec.conv_kernel)
        self._rule = scope.op(ops.channel_delta_rule)
        self._norm = RMSNorm(scope / "o_norm", spec.value_head_dim, NORM_EPS)
        self._gate = scope.op(ops.silu_and_mul)
        self._out = Linear(scope / "o_proj", spec.value_size, spec.hidden_size)
        self._parameters = [
            scope.parameter(name, spec.num_value_heads, dtype=torch.float32) for name in ("A_log", "dt_bias")
        ]
        self._fixed: tuple[Tensor, Tensor]
        """The rates at which heads forget, and what is added to their steps, [Hv] each."""
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        a_log, dt_bias = (parameter.take() for parameter in self._parameters)
        self._fixed = (a_log.exp(), dt_bias)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._projections.layers

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        spec, (rate, bias) = self._spec, self._fixed
        (conv_state, state), layout = batch.states_of_layer(self._index)
        *mixed, gate, decay, strength = self._projections(x)
        mixed_qkv = self._convolve(torch.cat(mixed, dim=-1), conv_state, layout)
        query, key, value = mixed_qkv.split([spec.key_size, spec.key_size, spec.value_size], dim=-1)
        values_per_key = spec.num_value_heads // spec.num_key_heads
        query, key = (
            each.unflatten(-1, (-1, spec.key_head_dim)).repeat_interleave(values_per_key, 1) for each in (query, key)
        )  # [T, Hv, Dk]
        log_decay = -rate * F.softplus(decay.float() + bias)
        out = self._rule(
            query,
            key,
            value.unflatten(-1, (-1, spec.value_head_dim)),
            log_decay[..., None].expand_as(query),
            spec.most_strength * torch.sigmoid(strength.float()),
            state,
            layout,
        )
        return self._out(self._gate(gate.contiguous(), self._norm(out).flatten(1)))
