"""An encoder of images and videos of any size with its connector, made of a `GridTowerSpec`.

Shape legend: E patches of the items that are encoded together, C width of the tower, D dimensions of a head, W width of
an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire_interfaces import Modality
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.towers.connector import Connector
from quire_models.towers.grids import (
    Places,
    ThwGrid,
    antialiased_positions,
    patch_places,
    stretched_positions,
    windows_of,
)
from quire_models.towers.layers import build_layers
from quire_models.towers.patches import PatchEmbedding, piece_tokens, tile_patches
from quire_models.towers.tower_spec import GridTowerSpec

__all__ = ["GridTower"]


class GridTower:
    """Patches of some items -> their embeddings, [embeddings of the item, W] each."""

    def __init__(self, spec: GridTowerSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the whole network: a description has full names.
        """
        self._spec = spec
        self._patches = PatchEmbedding(spec.patch, scope)
        self._layers = build_layers(spec, scope)
        self._connector = Connector(spec.connector, scope)
        self._deepstack = {layer: Connector(steps, scope) for layer, steps in spec.deepstack}
        attention = spec.layers[0].mixers[0]
        assert isinstance(attention, EncoderAttentionSpec)
        self._rotation = AxialRotation(spec, attention.head_dim, scope) if spec.rope_theta else None
        self._input_norm = None if spec.input_norm is None else make_norm(spec.input_norm, scope)
        self._final_norm = None if spec.final_norm is None else make_norm(spec.final_norm, scope)
        self._table: Tensor | None = None
        if spec.position_table:
            table = scope.parameter(spec.position_table, spec.position_side**2, spec.patch.hidden_size)
            scope.when_loaded(lambda: setattr(self, "_table", table.take()))
        self._piece_tokens = piece_tokens(scope.device)
        readers = {"squares": _read_patches, "image": self._read_image, "padded_rows": _read_padded_rows}
        self._read = readers[spec.pixel_layout]

    def encode(self, modality: Modality, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Args:
        items: Arrays of each item, under the names of the processor's outputs; pixels in the compute dtype.

        Raises:
            ValueError: An item has not as many patches as its grid says, or squares of patches are not whole.
        """
        names = self._spec.inputs[modality]
        pixels, grids = [], []
        for item in items:
            its_pixels, its_grids = self._read(*(item[name] for name in names))
            pixels.append(its_pixels)
            grids.append(its_grids)
        for each, its_grids in zip(pixels, grids, strict=True):
            self._check(each, its_grids)
        embeds: list[Tensor] = []
        for part in self._parts([len(each) for each in pixels]):
            whole = self._encode_grids(torch.cat(pixels[part]), [grid for one in grids[part] for grid in one])
            embeds += whole.split([len(each) // self._spec.merge_size**2 for each in pixels[part]])
        return embeds

    def _read_image(self, pixels: Tensor, sizes: Tensor) -> tuple[Tensor, list[ThwGrid]]:
        """An image that may have padding at its right and below -> its patches."""
        height, width = sizes.flatten().tolist()
        if pixels.shape[0] != 1:
            raise ValueError(f"an item has pixels of {list(pixels.shape)}, and the tower takes one image")
        patch_size = self._spec.patch.patch_size
        patches = tile_patches(pixels[:, :, :height, :width], patch_size)[0]
        return patches, [ThwGrid(1, height // patch_size, width // patch_size)]

    def _check(self, pixels: Tensor, grids: Sequence[ThwGrid]) -> None:
        merge = self._spec.merge_size
        if sum(grid.num_patches for grid in grids) != len(pixels):
            raise ValueError(f"an item has {len(pixels)} patches, and grids of {[tuple(grid) for grid in grids]}")
        if any(grid.height % merge or grid.width % merge for grid in grids):
            raise ValueError(f"rows and columns of {[tuple(grid) for grid in grids]} are no multiples of {merge}")

    def _parts(self, counts: list[int]) -> Iterator[slice]:
        """Items that are encoded together: as many as fit, at least one."""
        begin, total = 0, 0
        for index, count in enumerate(counts):
            if index > begin and total + count > self._piece_tokens:
                yield slice(begin, index)
                begin, total = index, 0
            total += count
        if counts:
            yield slice(begin, len(counts))

    def _encode_grids(self, pixels: Tensor, grids: list[ThwGrid]) -> Tensor:
        """[E, numbers of a patch] -> [embeddings, W], in the order of the grids."""
        spec, square = self._spec, self._spec.merge_size**2
        x = self._patches(pixels)
        if self._input_norm is not None:
            x = self._input_norm(x)
        places = [patch_places(grid, spec.merge_size if spec.pixel_layout == "squares" else 1) for grid in grids]
        if self._table is not None:
            x = x + self._positions(self._table, grids, places)
        rows, columns = (torch.cat(each).to(x.device) for each in zip(*places, strict=True))
        frame_lens = [grid.height * grid.width for grid in grids for _ in range(grid.time)]
        window_lens, order = frame_lens, None
        if spec.window_size:
            windows = windows_of(grids, spec.merge_size, spec.window_size)
            window_lens, order = windows.lens, windows.order.to(x.device)
            x, rows, columns = (_by_square(each, order, square) for each in (x, rows, columns))
        rotation = None if self._rotation is None else self._rotation(rows, columns)
        deep = []
        for index, layer in enumerate(self._layers):
            is_full = not spec.window_size or index in spec.full_attention_layers
            x = layer(x, frame_lens if is_full else window_lens, rotation)
            if (connector := self._deepstack.get(index)) is not None:
                deep.append(connector(x))
        if self._final_norm is not None:
            x = self._final_norm(x)
        embeds = self._connector(x, [(grid.height, grid.width) for grid in grids for _ in range(grid.time)])
        embeds = torch.cat([embeds, *deep], dim=-1) if deep else embeds
        return embeds if order is None else embeds[torch.argsort(order)]

    def _positions(self, table: Tensor, grids: list[ThwGrid], places: list[Places]) -> Tensor:
        """[E, C]."""
        side = self._spec.position_side
        if self._spec.is_antialiased:
            by_grid = {grid: antialiased_positions(table, side, grid) for grid in set(grids)}
            return torch.cat([by_grid[grid].repeat(grid.time, 1) for grid in grids])
        on_device = [Places(*(each.to(table.device) for each in one)) for one in places]
        return torch.cat(
            [stretched_positions(table, side, grid, one) for grid, one in zip(grids, on_device, strict=True)]
        )


class AxialRotation:
    """Rotary embedding by rows and columns: (rows, columns), both [E] -> cosines and signed sines [E, 1, D], as op
    `rotary_embedding` takes them. The first half of the pairs turns by the row, the other by the column."""

    def __init__(self, spec: GridTowerSpec, head_dim: int, scope: Scope) -> None:
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        shift = 2 / head_dim if spec.alternates_frequencies else 0.0
        rows, columns = 1.0 / spec.rope_theta**exponents, 1.0 / spec.rope_theta ** (exponents + shift)
        self._inverse = rows.to(scope.device), columns.to(scope.device)  # [D/4] each
        self._dtype = scope.dtype

    def __call__(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        places = zip((rows, columns), self._inverse, strict=True)
        angles = torch.cat([place.float()[:, None] * inverse for place, inverse in places], dim=-1)  # [E, D/2]
        cos, sin = angles.cos(), angles.sin()
        cosines, sines = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cosines.to(self._dtype)[:, None], sines.to(self._dtype)[:, None]


def _read_patches(pixels: Tensor, sizes: Tensor) -> tuple[Tensor, list[ThwGrid]]:
    return pixels, [ThwGrid(*each) for each in sizes.tolist()]


def _read_padded_rows(pixels: Tensor, sizes: Tensor) -> tuple[Tensor, list[ThwGrid]]:
    grids = [ThwGrid(1, *each) for each in sizes.tolist()]
    if len(grids) != len(pixels) or any(grid.num_patches > pixels.shape[1] for grid in grids):
        tiles = [(grid.height, grid.width) for grid in grids]
        raise ValueError(f"an item has patches of {list(pixels.shape[:2])}, and tiles of {tiles}")
    return torch.cat([tile[: grid.num_patches] for tile, grid in zip(pixels, grids, strict=True)]), grids


def _by_square(x: Tensor, order: Tensor, square: int) -> Tensor:
    """x [E, ...] with its squares, of so many tokens, in another order."""
    squares = x.view(len(order), square, *x.shape[1:])
    return squares[order].flatten(0, 1)
