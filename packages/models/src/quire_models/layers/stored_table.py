"""The table of an embedding that a checkpoint brings quantized, and keeps so.

Shape legend: T tokens, V rows of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models.layers.scope import Scope
from quire_models.layers.stored_linear import StoredLinear
from quire_ops import LinearWeights, ops

__all__ = ["StoredTable"]


class StoredTable:
    """Rows by op `quantized_embedding`. An LM head that is the embedding multiplies with the same weights."""

    __slots__ = ("_dtype", "_parameters", "_rows", "_size", "method", "weights")

    method: StoredLinear
    """Which multiplies with `weights`."""
    weights: dict[str, Tensor]
    """As `method` takes them. Set by `finish`."""

    def __init__(self, scope: Scope, method: StoredLinear, size: int) -> None:
        """Args:
        scope: Scope of the embedding.
        method: Reads the table as if it was a linear layer of `size` inputs.
        """
        self.method, self._size, self._dtype = method, size, scope.dtype
        self._parameters = scope.stored_parameters(method.tensors(), on_host=True)
        self._rows = scope.op(ops.quantized_embedding)

    def finish(self) -> LinearWeights:
        """Read the loaded parameters: the table as ops take it.

        Raises:
            CheckpointError: The table keeps the inputs of its layers in an order of their own.
        """
        tensors = {name: each.take() for name, each in self._parameters.items() if each.tensor is not None}
        self.weights = self.method.on_device(self.method.read(tensors, None))
        if "order" in self.weights:
            raise CheckpointError(
                f"{self.method.layer} is quantized with activation order, which an embedding cannot have; use a "
                "checkpoint whose embedding is not quantized"
            )
        return self._linear_weights

    @property
    def is_plain(self) -> bool:
        """Whether the device multiplies with the widened table."""
        return self.weights.keys() == {"weight"}

    @property
    def _linear_weights(self) -> LinearWeights:
        weights = self.weights
        return LinearWeights(weights["weight"], scale=weights.get("scale"), zero=weights.get("zero"))

    def rows_of(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, size]."""
        return self._rows(ids, self._linear_weights, self._size, self._dtype)

    def whole(self) -> Tensor:
        """[V, size] in the compute dtype; a copy where it is kept in another form."""
        weight = self.weights["weight"]
        return weight if self.is_plain else self.rows_of(torch.arange(len(weight), device=weight.device))
