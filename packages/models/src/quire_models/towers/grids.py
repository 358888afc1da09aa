"""Where the patches of an image or a video stand: rows, columns, windows, places in a table.

Shape legend: E patches of all grids, D rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Places", "ThwGrid", "Windows", "antialiased_positions", "patch_places", "stretched_positions", "windows_of"]


class ThwGrid(NamedTuple):
    """Frames, and rows and columns of patches of each."""

    time: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        """Patches of all frames."""
        return self.time * self.height * self.width


class Places(NamedTuple):
    """Where patches stand in their frames."""

    rows: Tensor
    """[E] int64."""
    columns: Tensor
    """[E] int64."""


class Windows(NamedTuple):
    """The order in which squares of patches stand window by window."""

    order: Tensor
    """[squares] int64: which square comes next."""
    lens: list[int]
    """Patches of each window."""


def patch_places(grid: ThwGrid, merge_size: int) -> Places:
    """Places of a grid's patches, which come square by square, `merge_size` on a side, frame by frame."""
    rows, columns = torch.meshgrid(torch.arange(grid.height), torch.arange(grid.width), indexing="ij")
    squares = (grid.height // merge_size, merge_size, grid.width // merge_size, merge_size)
    return Places(*(each.reshape(squares).transpose(1, 2).flatten().repeat(grid.time) for each in (rows, columns)))


def windows_of(grids: Sequence[ThwGrid], merge_size: int, window_size: int) -> Windows:
    """The windows of all grids, frame by frame. Within a frame those of one size stand next to each other.

    Args:
        window_size: Squares on a side of a window; those at the right and lower edges are smaller.
    """
    orders, lens, begin = [], [], 0
    for grid in grids:
        height, width = grid.height // merge_size, grid.width // merge_size
        index = torch.arange(grid.time * height * width)
        frame, row, column = index // (height * width), index // width % height, index % width
        across = -(-width // window_size)
        down = -(-height // window_size)
        window = (frame * down + row // window_size) * across + column // window_size
        sizes = torch.bincount(window)
        rank = torch.empty_like(sizes)
        its_frame = torch.arange(len(sizes)) // (across * down)
        by_size = torch.argsort(its_frame * (sizes.max() + 1) - sizes, stable=True)
        rank[by_size] = torch.arange(len(sizes))
        orders.append(torch.argsort(rank[window], stable=True) + begin)
        lens += (sizes[by_size] * merge_size**2).tolist()
        begin += len(index)
    return Windows(torch.cat(orders), lens)


def stretched_positions(table: Tensor, side: int, grid: ThwGrid, places: Places) -> Tensor:
    """[E, width]: a table of positions, [side * side, width], at a grid's patches: between the nearest four where it
    has another size, corners on corners."""
    row_low, row_high, row_share = _neighbours(places.rows, grid.height, side)
    column_low, column_high, column_share = _neighbours(places.columns, grid.width, side)

    def between(row: Tensor) -> Tensor:
        low, high = table[row * side + column_low].float(), table[row * side + column_high].float()
        return torch.lerp(low, high, column_share[:, None])

    return torch.lerp(between(row_low), between(row_high), row_share[:, None]).to(table.dtype)


def antialiased_positions(table: Tensor, side: int, grid: ThwGrid) -> Tensor:
    """[rows * columns, width]: a table of positions, [side * side, width], stretched to a frame of the grid, row by
    row; where that has fewer, each is the mean of those that it covers."""
    square = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    size = (grid.height, grid.width)
    stretched = F.interpolate(square, size=size, mode="bilinear", align_corners=False, antialias=True)
    return stretched[0].flatten(1).T.to(table.dtype)


def _neighbours(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """[E] each: places in a table of `side` before and behind those of a grid of `size`, and the share of the
    latter."""
    exact = index.float() * (side - 1) / max(size - 1, 1)
    low = exact.floor().long()
    return low, (low + 1).clamp_max(side - 1), exact - low
