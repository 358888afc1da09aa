"""A short causal convolution over each channel of a sequence, which remembers its last inputs."""

from __future__ import annotations

from torch import Tensor

from quire_attention import AttentionMetadata
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["ShortConvolution"]


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

    def __call__(self, x: Tensor, state: Tensor, layout: AttentionMetadata) -> Tensor:
        """`state` [num_blocks, taps - 1, channels]: see `quire_ops.recurrent`."""
        out: Tensor = self._convolve(x, self.weight, self.bias, state, layout, activation=self._activation)
        return out
