"""The addition of a layer's part to the residual stream, fused with the norm behind it.

Knows norms and the linear layers that take their result; does not know what was computed before the addition.

Shape legend: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quire_models.layers.activation_quant import ActivationQuant
from quire_models.layers.linear import Linear
from quire_models.layers.norm import RMSNorm
from quire_ops import QuantizedTokens, ops

__all__ = ["AddNorm", "consumers_of"]


class AddNorm:
    """(x, residual), both [T, hidden_size] -> (norm(x + residual), x + residual). May write over `residual`.

    With an `RMSNorm` that is one op, `add_rms_norm`; where a backend has `add_rms_norm_quant` and the
    result quantize their inputs alike, it quantizes the result for all of them, too.
    """

    __slots__ = ("_add_norm", "_rms_norm", "norm", "quant")

    quant: ActivationQuant[..., tuple[QuantizedTokens, Tensor]] | None
    """How the result is quantized; None with a norm of another kind."""

    def __init__(self, norm: Callable[[Tensor], Tensor] | None, consumers: Sequence[Linear] = ()) -> None:
        """Args:
        norm: None for none: then the sum stands in the place of its norm.
        consumers: The linear layers that take the normalised sum, if nothing else takes it. They are made before this.
        """
        self.norm = norm
        self.quant = None
        self._rms_norm = norm if isinstance(norm, RMSNorm) else None
        if self._rms_norm is not None:
            self._add_norm = self._rms_norm.scope.op(ops.add_rms_norm)
            self.quant = ActivationQuant(self._rms_norm.scope, ops.add_rms_norm_quant, consumers)

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor]:
        """x and residual [T, hidden_size]; without a residual, x is the stream and nothing is added.

        Returns:
            The normalised sum [T, hidden_size], or `QuantizedTokens` of it for its consumers, and the sum.
        """
        if residual is None:
            return x if self.norm is None else self.norm(x), x
        norm, quant = self._rms_norm, self.quant
        if norm is None or quant is None:
            total = x + residual
            return total if self.norm is None else self.norm(total), total
        if quant.activation_scheme is None:
            return self._add_norm(x, residual, norm.weight, norm.eps)
        return quant.function(x, residual, norm.weight, norm.eps, quant.activation_scheme)


def consumers_of(part: object) -> Sequence[Linear]:
    """The linear layers that take the input of a mixer or feed-forward network, if nothing else in it does; else
    none."""
    layers: Sequence[Linear] = getattr(part, "consumers", ())
    return layers
