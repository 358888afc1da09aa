"""A short causal convolution over each channel of a sequence, which remembers its last inputs, alone and gated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.linear import Linear, unadapted_weights
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import ShortConvSpec
from quire_ops import PagedLayout, QuantizedTokens, ShortConvWeights, ops

__all__ = ["GatedShortConvolution", "ShortConvolution"]


class ShortConvolution:
    """x [T, channels] -> [T, channels], through op `causal_conv1d`."""

    __slots__ = ("_activation", "_bias", "_convolve", "_weight", "bias", "weight")

    def __init__(
        self, scope: Scope, channels: int, taps: int, *, bias: bool = False, activation: str | None = None
    ) -> None:
        """Args:
        activation: "silu" or None.
        """
        self._convolve = scope.op(ops.causal_conv1d, taps=taps)
        self._activation = activation
        self._weight = scope.parameter("weight", channels, 1, taps)
        self._bias = scope.parameter("bias", channels) if bias else None
        self.weight: Tensor
        self.bias: Tensor | None
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        # Kernels read it tap by tap.
        self.weight = self._weight.take()[:, 0].t().contiguous().t()
        self.bias = None if self._bias is None else self._bias.take()

    def __call__(self, x: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
        """`state` [num_blocks, taps - 1, channels]: see `quire_ops.recurrent`."""
        out: Tensor = self._convolve(x, self.weight, self.bias, state, layout, activation=self._activation)
        return out


class GatedShortConvolution:
    """x [T, hidden_size] -> [T, hidden_size]: out(c * conv(b * x)) with b, c and x projected (LFM2)."""

    def __init__(self, spec: ShortConvSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its state.
        scope: Scope of the mixer itself.
        """
        hidden = spec.hidden_size
        self.in_proj = Linear(scope / "in_proj", hidden, 3 * hidden, bias=spec.bias)
        self.conv = ShortConvolution(scope / "conv", hidden, spec.conv_kernel, bias=spec.bias)
        self.out_proj = Linear(scope / "out_proj", hidden, hidden, bias=spec.bias)
        self.cache = index

    def fused_weights(self) -> ShortConvWeights | None:
        """The mixer as data for op `decoder_stack`, or None when that op cannot compute it."""
        weights = unadapted_weights(in_proj=self.in_proj, out_proj=self.out_proj)
        return None if weights is None else ShortConvWeights(**weights, taps=self.conv.weight, conv_bias=self.conv.bias)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layer that takes x."""
        return (self.in_proj,)

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self.cache)
        b, c, inner = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(c * self.conv(b * inner, state, layout))
