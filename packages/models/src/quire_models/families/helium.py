"""Helium (Kyutai 2025): Llama with neighbours rotated as pairs."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """The output projection never has a bias."""
    sizes = decoder_sizes(config, head_dim=128, theta=100000.0, eps=1e-8)
    attention = sizes.attention(qkv_bias=config.flag("attention_bias", default=False), interleaved=True)
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    return sizes.network(sizes.pre_norm(layer, attention, mlp) for layer in sizes.layers)
