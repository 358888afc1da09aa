"""Linear layers that all take the same input, in one product.

Where weights are copied to a device anyway they lie there one behind the other, in one piece of memory, and one
product makes the results of all layers side by side: a launch in the place of two or three, which has enough outputs to
keep a GPU busy. Each layer's own weights are views of that memory. Weights that are mapped from files stay where they
are, and each layer multiplies for itself.

Knows linear layers; the forms of their weights are known to `quire_quantization.joined`.

Shape legend: N rows, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire_models.layers.linear import Linear, same_scales
from quire_models.layers.scope import AdjacentParameters, Scope
from quire_models.layers.stored_linear import StoredLinear
from quire_ops import QuantizedTokens
from quire_quantization.joined import BLOCK, join_weights, split_weights

__all__ = ["MergedLinear"]


class MergedLinear:
    """x [N, in_features], or quantized by the layers' `activation_scheme` -> [N, O] of each layer, rows apart."""

    __slots__ = ("_adjacent", "_layers", "_sizes", "_weights")

    def __init__(self, scope: Scope, *layers: Linear) -> None:
        """Args:
        layers: That have just been made, and take nothing else; nothing that reads their weights is made before.
        """
        self._layers = layers
        self._sizes = [layer.num_outputs for layer in layers]
        self._weights: dict[str, Tensor] | None = None
        self._adjacent: dict[str, AdjacentParameters] = {}
        # Then no layer's part is less aligned than memory of its own, and blocks of outputs are those of one layer.
        if not scope.joins_products or any(size % BLOCK for size in self._sizes):
            return
        declared = [layer.parameters for layer in layers]
        if any(each.keys() != declared[0].keys() for each in declared):
            return
        for layer in layers:
            layer.is_joined = True
        if not any(isinstance(layer.method, StoredLinear) for layer in layers):
            self._adjacent = {name: AdjacentParameters([each[name] for each in declared]) for name in declared[0]}
        scope.when_loaded(self._finish)

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The layers that take the input."""
        return self._layers

    @property
    def is_joined(self) -> bool:
        """Whether it is one product, once the layers are loaded."""
        return self._weights is not None

    def _finish(self) -> None:
        first = self._layers[0].method
        is_one = all(layer.method is first for layer in self._layers)
        if is_one and not isinstance(first, StoredLinear):
            taken = {name: parameters.take() for name, parameters in self._adjacent.items()}
            self._weights = first.make_weights(taken["weight"], taken.get("bias"))
            parts = split_weights(self._weights, self._sizes)
        else:
            parts = [layer.make_weights() for layer in self._layers]
            if self._are_alike(parts) and (joined := join_weights(parts)) is not None:
                self._weights = self._layers[0].on_device(joined)
                parts = split_weights(self._weights, self._sizes)
        self._adjacent.clear()
        for layer, part in zip(self._layers, parts, strict=True):
            layer.keep(part)

    def _are_alike(self, parts: Sequence[dict[str, Tensor]]) -> bool:
        """Whether one kernel multiplies with the weights of all these layers of a quantized checkpoint, and rounds
        inputs alike."""
        methods = [layer.method for layer in self._layers]
        rules = {(method.choice.kernel.op, method.choice.inputs)
                 for method in methods if isinstance(method, StoredLinear) and method.choice is not None}  # fmt: skip
        if len(rules) != 1 or not all(isinstance(method, StoredLinear) for method in methods):
            return False
        return same_scales(self._layers, [part["input_scale"] for part in parts if "input_scale" in part])

    @property
    def plain_weights(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of all layers as they lie in memory; None where they are not joined, or kept in another
        form."""
        if self._weights is None or any(layer.plain() is None for layer in self._layers):
            return None
        return self._weights["weight"], self._weights.get("bias")

    @property
    def is_adapted(self) -> bool:
        """Whether something is added to the product in this step."""
        return any(layer.is_adapted for layer in self._layers)

    def __call__(self, x: Tensor | QuantizedTokens) -> tuple[Tensor, ...]:
        if self._weights is None:
            return tuple(layer(x) for layer in self._layers)
        parts = self.split(self._layers[0].method.apply(self._weights, x))
        for layer, part in zip(self._layers, parts, strict=True):
            layer.adapt(part, x)
        return tuple(layer.gather(part) for layer, part in zip(self._layers, parts, strict=True))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """[N, outputs of all layers] -> views of it, [N, O] of each layer."""
        parts: tuple[Tensor, ...] = whole.split(self._sizes, dim=-1)
        return parts
