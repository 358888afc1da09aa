"""Modules that only Falcon H1 has.

Shape legend: T tokens of the step.
"""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, build_mixer
from quire_models.families.falcon_h1 import FalconH1LayerSpec, ScaledMLPSpec
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["ScaledMLP", "SideBySide", "make_layer"]


class ScaledMLP:
    """x [T, hidden_size] -> the same: c * down(silu(g * gate(x)) * up(x))."""

    def __init__(self, spec: ScaledMLPSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner = scope / spec.name
        self.gate_proj, self.up_proj, self.down_proj = (Linear.of(inner, each) for each in spec.projections())
        self._gate_and_up = MergedLinear(inner, self.gate_proj, self.up_proj)
        self._gate = scope.op(ops.silu_and_mul)
        self._gate_factor, self._out_factor = spec.gate_factor, spec.out_factor

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_and_up(x)
        return self.down_proj(self._gate(gate * self._gate_factor, up)) * self._out_factor


class SideBySide:
    """x [T, hidden_size] -> the same: mamba(x) + attention(x), both with factors of what they take and give."""

    def __init__(self, spec: FalconH1LayerSpec, index: int, scope: Scope) -> None:
        mamba, attention = spec.mixers
        self.mamba = build_mixer(mamba, index, scope)
        self.attention = build_mixer(attention, index + 1, scope)
        self._factors = (*spec.mamba_factors, *spec.attention_factors)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        mamba_in, mamba_out, attention_in, attention_out = self._factors
        mixed = self.mamba(x * mamba_in, cos, sin, batch) * mamba_out
        return mixed + self.attention(x * attention_in, cos, sin, batch) * attention_out


def make_layer(spec: FalconH1LayerSpec, index: int, scope: Scope) -> SequentialBlock:
    """A layer.

    Args:
        index: Number of its first cache in a batch, which has the states of Mamba-2.
    """
    assert spec.input_norm is not None
    assert spec.feed_forward is not None
    assert spec.feed_forward_norm is not None
    return SequentialBlock(
        input_norm=make_norm(spec.input_norm, scope),
        mixer=SideBySide(spec, index, scope),
        feed_forward_norm=make_norm(spec.feed_forward_norm, scope),
        feed_forward=build_feed_forward(spec.feed_forward, scope),
    )
