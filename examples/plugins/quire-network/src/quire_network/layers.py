"""The layer that nobody else has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire_models.layers.mlp import GatedMLP
from quire_models.layers.scope import Scope
from quire_network import DampedMLPSpec

__all__ = ["DampedMLP"]


class DampedMLP:
    """A gated feed-forward network, damped: [num_tokens, hidden_size] -> the same.

    Args:
        spec: Its description.
        scope: Scope of the layer.
    """

    def __init__(self, spec: DampedMLPSpec, scope: Scope) -> None:
        self._mlp = GatedMLP(spec, scope / spec.name)
        self._damping = spec.damping

    def __call__(self, x: Any) -> Tensor:
        return self._mlp(x) * self._damping
