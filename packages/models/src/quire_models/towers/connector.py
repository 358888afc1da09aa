"""From a tower's tokens to embeddings of the language model, step by step as a description says.

Shape legend: E tokens of all tiles, C width of a token before a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from quire_models.layers.activations import activation
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.spec import LinearSpec, NormSpec
from quire_models.towers.tower_spec import ActivationSpec, ConnectorStep, MergeSpec, PixelShuffleSpec, PoolSpec

__all__ = ["Connector", "Grid", "by_grid"]

Grid = tuple[int, int]
"""Rows and columns of tokens of a tile."""
_Step = Callable[[Tensor, Sequence[Grid]], Tensor]


class Connector:
    """x [E, C] -> [embeddings of all tiles, width of an embedding]."""

    def __init__(self, steps: Sequence[ConnectorStep], scope: Scope) -> None:
        self._steps = [_make_step(step, scope) for step in steps]

    def __call__(self, x: Tensor, grids: Sequence[Grid] = ()) -> Tensor:
        """Args:
        grids: Of each tile, one behind the other in x; for steps that speak of squares.
        """
        for step in self._steps:
            x = step(x, grids)
        return x


def _make_step(spec: ConnectorStep, scope: Scope) -> _Step:
    if isinstance(spec, PixelShuffleSpec):
        return partial(_pixel_shuffle, spec)
    if isinstance(spec, PoolSpec):
        factor = spec.factor
        return lambda x, grids: by_grid(x, grids, lambda tiles: _squares(tiles, factor).mean(-2))
    if isinstance(spec, MergeSpec):
        num_tokens = spec.num_tokens
        return lambda x, grids: x.view(len(x) // num_tokens, -1)
    map_tokens: Callable[[Tensor], Tensor]
    if isinstance(spec, LinearSpec):
        map_tokens = Linear.of(scope, spec)
    elif isinstance(spec, NormSpec):
        map_tokens = make_norm(spec, scope)
    else:
        assert isinstance(spec, ActivationSpec)
        map_tokens = activation(scope, spec.act)
    return lambda x, grids: map_tokens(x)


def _pixel_shuffle(spec: PixelShuffleSpec, x: Tensor, grids: Sequence[Grid]) -> Tensor:
    def shuffle(tiles: Tensor) -> Tensor:
        squares = _squares(tiles, spec.factor)
        return (squares.transpose(-1, -2) if spec.channels_first else squares).flatten(-2)

    return by_grid(x, grids, shuffle)


def by_grid(x: Tensor, grids: Sequence[Grid], function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function makes of tiles, one behind the other: tiles of one size that stand next to each other are one
    call.

    Args:
        x: [E, C].
        function: [tiles, rows, columns, C] -> [tiles, ..., width].

    Returns:
        [tokens of all tiles, width].
    """
    parts, begin = [], 0
    for (rows, columns), tiles in groupby(grids):
        count = len(list(tiles))
        end = begin + count * rows * columns
        parts.append(function(x[begin:end].view(count, rows, columns, -1)).flatten(0, -2))
        begin = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _squares(tiles: Tensor, side: int) -> Tensor:
    """[tiles, rows, columns, C] -> [tiles, rows / side, columns / side, side * side, C]: squares of tokens, row by
    row."""
    num_tiles, rows, columns, _ = tiles.shape
    split = tiles.view(num_tiles, rows // side, side, columns // side, side, -1)
    return split.transpose(2, 3).flatten(3, 4)
