"""An encoder of image tiles with its connector, made of a `TileTowerSpec`.

Shape legend: N tiles, P patches of a tile, S tokens of a tile (its patches, and the class token where there is one),
C width of the tower, W width of an embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces import Modality
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Parameter, Scope
from quire_models.towers.connector import Connector
from quire_models.towers.layers import build_layers
from quire_models.towers.patches import PatchEmbedding, piece_tokens, tile_patches
from quire_models.towers.tower_spec import LearnedPositionsSpec, TileTowerSpec

__all__ = ["TileTower"]


class TileTower:
    """Pixels of some items -> their embeddings, [embeddings of the item, W] each."""

    def __init__(self, spec: TileTowerSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the whole network: a description has full names.
        """
        self._spec = spec
        self._patches = PatchEmbedding(spec.patch, scope)
        self._positions = LearnedPositions(spec.positions, spec.patch.hidden_size, scope)
        self._input_norm = None if spec.input_norm is None else make_norm(spec.input_norm, scope)
        self._layers = build_layers(spec, scope)
        self._final_norm = None if spec.final_norm is None else make_norm(spec.final_norm, scope)
        self._connector = Connector(spec.connector, scope)
        self._piece_tokens = piece_tokens(scope.device)

    def encode(self, modality: Modality, items: list[dict[str, Tensor]]) -> list[Tensor]:
        """Args:
        items: Arrays of each item, under the names of the processor's outputs; pixels in the compute dtype.

        Raises:
            ValueError: A tile has another size than the tower's.
        """
        tiles = [self._tiles(item, modality) for item in items]
        side = self._spec.image_size // self._spec.patch.patch_size
        pixels = torch.cat(tiles)
        step = max(1, self._piece_tokens // side**2)
        pieces = [self._encode_tiles(piece, side) for piece in pixels.split(step)]
        encoded = torch.cat(pieces)  # [N, embeddings of a tile, W]
        return [part.flatten(0, 1) for part in encoded.split([len(each) for each in tiles])]

    def _tiles(self, item: dict[str, Tensor], modality: Modality) -> Tensor:
        """[N, channels, height, width] of an item."""
        pixels = item[self._spec.inputs[modality][0]]
        tiles, size = pixels.reshape(-1, *pixels.shape[-3:]), self._spec.image_size
        if tiles.shape[-2:] != (size, size):
            raise ValueError(
                f"a tile is {tiles.shape[-1]} x {tiles.shape[-2]} pixels, and the tower takes {size} x {size}"
            )
        mask = item.get("pixel_attention_mask")
        if mask is not None and not bool(mask.all()):
            raise ValueError("a tile has padding, which the tower does not take")
        return tiles

    def _encode_tiles(self, tiles: Tensor, side: int) -> Tensor:
        """[N, channels, height, width] -> [N, embeddings of a tile, W]."""
        x = self._run_layers(tiles)  # [N, S, C]
        num_tiles, num_tokens = x.shape[:2]
        if num_tokens > side**2 and not self._spec.keeps_class_token:
            x = x[:, 1:]
        embeds = self._connector(x.flatten(0, 1), [(side, side)] * num_tiles)
        return embeds.view(num_tiles, -1, embeds.shape[-1])

    def _run_layers(self, tiles: Tensor) -> Tensor:
        """[N, channels, height, width] -> what is behind the last layer and its norm, [N, S, C]."""
        x = self._positions(self._patches(tile_patches(tiles, self._spec.patch.patch_size)))  # [N, S, C]
        num_tiles, num_tokens = x.shape[:2]
        x = x.flatten(0, 1)
        if self._input_norm is not None:
            x = self._input_norm(x)
        lens = [num_tokens] * num_tiles
        for layer in self._layers:
            x = layer(x, lens)
        if self._final_norm is not None:
            x = self._final_norm(x)
        return x.view(num_tiles, num_tokens, -1)


class LearnedPositions:
    """Patches [N, P, C] -> tokens [N, S, C], with the class token in front and positions added."""

    def __init__(self, spec: LearnedPositionsSpec, size: int, scope: Scope) -> None:
        num_class_tokens = 1 if spec.class_token else 0
        self._table = scope.parameter(spec.name, spec.side**2 + num_class_tokens, size)
        self._class_token = scope.parameter(spec.class_token, size) if spec.class_token else None
        if spec.is_batched:
            for each in (self._table, self._class_token):
                if each is not None:
                    _unbatch(each, size, scope)
        self._added: Tensor
        self._first: Tensor | None = None
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._added = self._table.take()
        if self._class_token is not None:
            self._first = self._class_token.take() + self._added[0]
            self._added = self._added[1:]

    def __call__(self, patches: Tensor) -> Tensor:
        x = patches + self._added
        return x if self._first is None else torch.cat((self._first.expand(len(x), 1, -1), x), dim=1)


def _unbatch(parameter: Parameter, size: int, scope: Scope) -> None:
    """Have a parameter of the checkpoint with dimensions of one before its own."""
    shape = (1, parameter.shape[0] if len(parameter.shape) == 2 else 1, size)
    scope.packed(parameter.name, shape, lambda tensor: [(parameter.name, tensor.view(parameter.shape))])
