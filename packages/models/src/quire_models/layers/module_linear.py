"""Quire's linear layers in the place of torch's, in networks that are made of torch modules, as Transformers' are.

Knows one layer; does not know which layers of a network are exchanged, nor files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope

__all__ = ["ExchangedLinear"]


class ExchangedLinear(nn.Module):
    """x [..., in_features] -> [..., out_features], through a linear method, with a weight in whatever form that keeps.

    Where ranks share the network, each has some of the outputs, and gathers those of the others.
    """

    def __init__(self, scope: Scope, linear: nn.Linear) -> None:
        """Args:
        scope: Of the layer, by its full name. Adapters are not placed through it (`place_adapters`).
        linear: The layer whose place it takes; its weight may be on the meta device.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        has_bias = linear.bias is not None
        self.linear = Linear(scope, linear.in_features, linear.out_features, bias=has_bias)
        self._dtype, self._device = scope.dtype, scope.device

    @property
    def weight(self) -> Tensor:
        """An empty tensor of the compute dtype: classes ask for the dtype and device of a weight. Who multiplies with
        it gets an error, not a wrong product."""
        return torch.empty(0, dtype=self._dtype, device=self._device)

    @property
    def is_shared(self) -> bool:
        """Whether this rank has some of the outputs."""
        return self.linear.shard is not None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, and gather."""
        out: Tensor = self.linear(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)
