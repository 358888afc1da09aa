"""Modules that only Cohere's mixtures have."""

from __future__ import annotations

from torch import Tensor

from quire_models.layers.moe import SparseMoE
from quire_ops import QuantizedTokens

__all__ = ["AveragedMoE"]


class AveragedMoE(SparseMoE):
    """x [T, I] -> [T, I]: the mean of what the router's experts and the shared network make of each token."""

    __slots__ = ()

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        return SparseMoE.__call__(self, x) * 0.5

    def fused_weights(self) -> None:
        """None: op `decoder_stack` adds them."""
