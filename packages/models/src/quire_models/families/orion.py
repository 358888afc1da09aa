"""Orion (OrionStar 2024): Llama with layer norms."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Norms have a weight and a bias; linear layers have no bias."""
    sizes = decoder_sizes(config, eps=1e-5)
    attention = sizes.attention()
    return sizes.network(
        (sizes.pre_norm(layer, attention, norm=sizes.layer_norm) for layer in sizes.layers),
        final_norm=sizes.layer_norm("norm"),
    )
