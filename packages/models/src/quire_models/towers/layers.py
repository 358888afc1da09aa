"""A tower's layers, whose feed-forward networks are a little wider than those of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.nn.functional as F
from torch import Tensor

from quire_models.build import within
from quire_models.feed_forward_spec import GatedMLPSpec, MLPSpec
from quire_models.layers.encoder import EncoderLayer
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import MLP
from quire_models.layers.scope import Scope
from quire_models.layers.stored_linear import StoredLinear
from quire_models.spec import LinearSpec
from quire_models.towers.tower_spec import TowerSpec

__all__ = ["build_layers"]


def build_layers(spec: TowerSpec, scope: Scope) -> list[EncoderLayer]:
    """The layers, which fill what the checkpoint does not bring of their feed-forward networks with zeros.

    Args:
        scope: Scope of the whole network.
    """
    for layer in spec.layers:
        assert isinstance(layer.feed_forward, MLPSpec | GatedMLPSpec)
        padding = layer.feed_forward.intermediate_size - spec.intermediate_size
        inner = within(scope / layer.name, layer.feed_forward.name)
        *ups, down = layer.feed_forward.projections()
        for up in ups if padding else ():
            _pad(inner, up, "weight", (spec.intermediate_size, up.in_features), (0, 0, 0, padding))
            if up.bias:
                _pad(inner, up, "bias", (spec.intermediate_size,), (0, padding))
        if padding:
            _pad(inner, down, "weight", (down.out_features, spec.intermediate_size), (0, padding))
    layers = [EncoderLayer(layer, scope / layer.name) for layer in spec.layers]
    for record, built in zip(spec.layers, layers, strict=True) if spec.layer_scales else ():
        network = built.feed_forward
        assert isinstance(network, MLP)
        for name, linear in zip(spec.layer_scales, (built.attention.out, network.down), strict=True):
            _scale(scope / record.name, name, linear)
    return layers


def _scale(scope: Scope, name: str, linear: Linear) -> None:
    """Have factors of what a linear layer gives in its weights."""
    factors = scope.parameter(name, linear.shape[0])

    def fold() -> None:
        factor = factors.take().float()
        weight, bias = linear.base()
        scaled = (weight * factor[:, None]).to(scope.dtype)
        method = linear.method
        assert not isinstance(method, StoredLinear)
        linear.keep(method.make_weights(scaled, None if bias is None else (bias * factor).to(scope.dtype)))

    scope.when_loaded(fold)


def _pad(scope: Scope, linear: LinearSpec, kind: str, shape: tuple[int, ...], padding: tuple[int, ...]) -> None:
    """Have a parameter of a linear layer padded when it is read, from its shape in the checkpoint."""
    inner = scope / linear.name
    name = f"{inner.prefix}{kind}"
    inner.packed(kind, shape, _padded(name, padding))


def _padded(name: str, padding: tuple[int, ...]) -> Callable[[Tensor], Iterable[tuple[str, Tensor]]]:
    return lambda tensor: [(name, F.pad(tensor, padding))]
