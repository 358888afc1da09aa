"""Pixels -> patches, by one product.

Shape legend: N tiles, P patches of a tile, C width of the tower.
"""

from __future__ import annotations

from torch import Tensor

from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope
from quire_models.towers.tower_spec import PatchSpec

__all__ = ["PatchEmbedding"]


class PatchEmbedding:
    """tiles [N, channels, height, width] -> [N, P, C], row by row; what is left over at the edges is cut off."""

    def __init__(self, spec: PatchSpec, scope: Scope) -> None:
        self._size = spec.patch_size
        inner = scope / spec.name
        kernel = spec.kernel
        in_features = 1
        for size in kernel[1:]:
            in_features *= size
        self._linear = Linear(inner, in_features, spec.hidden_size, bias=spec.has_bias)
        inner.packed("weight", kernel, lambda weight: [(self._linear.name, weight.flatten(1))])

    def __call__(self, tiles: Tensor) -> Tensor:
        size, channels = self._size, tiles.shape[1]
        height, width = tiles.shape[2] // size, tiles.shape[3] // size
        whole = tiles[:, :, : height * size, : width * size]
        cut = whole.reshape(len(tiles), channels, height, size, width, size)
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(len(tiles) * height * width, -1)
        embedded = self._linear(patches)
        return embedded.view(len(tiles), height * width, -1)
