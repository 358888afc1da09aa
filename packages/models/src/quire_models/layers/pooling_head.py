"""Tensors that a checkpoint brings for its pooler: classifiers, rewards, heads of masked language models."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.layers.scope import Scope
from quire_models.spec import NetworkSpec

__all__ = ["PoolingHead"]


class PoolingHead:
    """The tensors of a network's pooler. What is computed with them is in quire-pooling.

    They stay in float32 whatever the network runs in: they are small, and what they give is compared with thresholds.
    """

    __slots__ = ("_parameters", "names", "weights")

    names: frozenset[str]
    """Of all tensors, that of the table of tokens included where the pooler shares it."""
    weights: dict[str, Tensor]
    """Name -> tensor, without the table of tokens; empty before weights are loaded."""

    def __init__(self, spec: NetworkSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the network.
        """
        self.names = frozenset() if spec.pooler is None else frozenset(spec.pooler.shapes())
        self.weights = {}
        self._parameters = {
            name: scope.parameter(name, *shape, dtype=torch.float32) for name, shape in spec.head_shapes().items()
        }
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weights = {name: parameter.take() for name, parameter in self._parameters.items()}
