"""Quantization of activations in the norm or gate that makes them, for all the linear layers that take them.

Knows linear layers and the ops that quantize; does not know what those compute before they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

from quire_models.layers.linear import Linear, same_scales
from quire_models.layers.scope import Scope
from quire_ops import ActivationScheme, Op
from quire_ops.ops import op_named

__all__ = ["ActivationQuant"]

P = ParamSpec("P")
R = TypeVar("R")


class ActivationQuant(Generic[P, R]):
    """An op that quantizes its result, and the form it quantizes to: that of all the linear layers that take it, where
    nothing else takes it."""

    __slots__ = ("_layers", "_op", "_scope", "activation_scheme", "function")

    function: Callable[P, R]
    activation_scheme: ActivationScheme | None
    """Form of the quantized result; None before the layers are loaded, and where each of them quantizes its inputs for
    itself, or takes them as they are."""

    def __init__(self, scope: Scope, op: Op[P, R], layers: Sequence[Linear]) -> None:
        """Args:
        op: The op that quantizes its result.
        layers: Linear layers that take its result. They are made before this, since what is made is loaded in order.
        """
        self._scope, self._op, self._layers = scope, op, layers
        self.activation_scheme = None
        if layers:
            scope.when_loaded(self._finish)

    def _finish(self) -> None:
        first, *others = (layer.activation_scheme for layer in self._layers)
        if first is None or not all(_same_rule(first, other) for other in others):
            return
        if not same_scales(self._layers, [each.input_scale for each in (first, *others) if each is not None]):
            return
        backend = self._scope.choose(self._op)
        if any(self._scope.choose(op_named(name)).name != backend.name for name in {each.op for each in self._layers}):
            return
        self._scope.chosen.append(backend)
        self.function, self.activation_scheme = backend.function, first


def _same_rule(one: ActivationScheme, other: ActivationScheme | None) -> bool:
    return other is not None and (one.dtype, one.by_group) == (other.dtype, other.by_group)
