"""An encoder of images with one vector each, made of a `VectorTowerSpec`.

Shape legend: N images, S tokens of an image, C width of the tower, H heads, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire_models.build import build_feed_forward
from quire_models.feed_forward_spec import MLPSpec
from quire_models.layers.linear import Linear
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.spec import LinearSpec, NormSpec
from quire_models.towers.tile_tower import TileTower
from quire_models.towers.vector_tower_spec import AttentionPoolSpec, VectorTowerSpec

__all__ = ["VectorTower"]


class VectorTower(TileTower):
    """Pixels of some images -> their vectors, [1, W] each."""

    def __init__(self, spec: VectorTowerSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the whole network.
        """
        super().__init__(spec, scope)
        self._pool = None if spec.pool is None else AttentionPool(spec.pool, scope)

    def _encode_tiles(self, tiles: Tensor, side: int) -> Tensor:
        """[N, channels, height, width] -> [N, 1, W]."""
        x = self._run_layers(tiles)  # [N, S, C]
        pooled = x[:, 0] if self._pool is None else self._pool(x)
        return self._connector(pooled.contiguous()).unsqueeze(1)


class AttentionPool:
    """x [N, S, C] -> [N, C]: a learned query attends to the tokens of each image (Zhai et al. 2022, "Scaling Vision
    Transformers", sec. 3.2), and a feed-forward network with a norm before it is added."""

    def __init__(self, spec: AttentionPoolSpec, scope: Scope) -> None:
        size, inner = spec.hidden_size, scope / spec.name
        self._num_heads, self._scale = spec.num_heads, (size // spec.num_heads) ** -0.5
        self._probe = inner.parameter("probe", 1, 1, size)
        attention = inner / "attention"
        names = ("query", "key", "value")
        linears = [LinearSpec(name=name, in_features=size, out_features=size, bias=True) for name in names]
        self._query, self._key, self._value = (Linear.of(attention, each) for each in linears)
        for kind, shape in (("weight", (3 * size, size)), ("bias", (3 * size,))):
            targets = [f"{attention.prefix}{name}.{kind}" for name in names]
            attention.packed(f"in_proj_{kind}", shape, partial(_thirds, targets))
        self._out = Linear.of(attention, LinearSpec(name="out_proj", in_features=size, out_features=size, bias=True))
        norm = NormSpec(name="layernorm", size=size, eps=spec.eps, kind="layer", has_bias=True)
        self._norm = make_norm(norm, inner)
        mlp = MLPSpec(hidden_size=size, intermediate_size=spec.intermediate_size, act=spec.act)
        self._mlp = build_feed_forward(mlp, inner)
        self._first: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._first = self._probe.take().view(1, -1)

    def __call__(self, x: Tensor) -> Tensor:
        num_images, num_tokens, size = x.shape
        tokens = x.reshape(-1, size)
        query = self._query(self._first).view(self._num_heads, -1)  # [H, D]
        key, value = (
            linear(tokens).view(num_images, num_tokens, self._num_heads, -1).float()
            for linear in (self._key, self._value)
        )
        scores = (key * (query.float() * self._scale)).sum(-1)  # [N, S, H]
        weights = torch.softmax(scores, dim=1)
        attended = (weights.unsqueeze(-1) * value).sum(1).flatten(1).to(x.dtype)  # [N, C]
        pooled = self._out(attended)
        return pooled + self._mlp(self._norm(pooled))


def _thirds(names: Sequence[str], tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The parts of a tensor of queries, keys and values, by the names of the parameters that take them."""
    return list(zip(names, tensor.chunk(3), strict=True))
