"""Pixels -> patches, by one product.

Shape legend: N tiles, P patches of a tile, C width of the tower.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_models.layers.linear import Linear
from quire_models.layers.scope import Scope
from quire_models.towers.tower_spec import PatchSpec, padded_size

__all__ = ["PatchEmbedding", "piece_tokens", "tile_patches"]


def piece_tokens(device: torch.device) -> int:
    """Tokens that go through a tower's layers together: more do not fill the device better, and need more memory."""
    return 1024 if device.type == "cpu" else 32768


def tile_patches(tiles: Tensor, patch_size: int) -> Tensor:
    """tiles [N, channels, height, width] -> [N, P, numbers of a patch], row by row; what is left over at the edges is
    cut off."""
    num_tiles, channels = tiles.shape[:2]
    rows, columns = tiles.shape[2] // patch_size, tiles.shape[3] // patch_size
    whole = tiles[:, :, : rows * patch_size, : columns * patch_size]
    cut = whole.reshape(num_tiles, channels, rows, patch_size, columns, patch_size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(num_tiles, rows * columns, -1)


class PatchEmbedding:
    """patches [..., numbers of a patch] -> [..., C]. It is never quantized: it is small, and all that follows has its
    errors."""

    def __init__(self, spec: PatchSpec, scope: Scope) -> None:
        inner, size = scope / spec.name, prod(spec.kernel[1:])
        self._linear = Linear(inner, padded_size(size), spec.hidden_size, bias=spec.has_bias, method=scope.plain_method)
        self._padding = (0, padded_size(size) - size)
        inner.packed("weight", spec.kernel, lambda weight: [(self._linear.name, self._pad(weight.flatten(1)))])

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, self._padding) if self._padding[1] else x

    def __call__(self, patches: Tensor) -> Tensor:
        embedded = self._linear(self._pad(patches.flatten(0, -2)))
        return embedded.view(*patches.shape[:-1], -1)
