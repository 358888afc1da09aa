"""Seed-OSS (ByteDance 2025): Llama with biases on query, key and value."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """The output projection has a bias if asked for."""
    sizes = decoder_sizes(config, head_dim=128)
    attention = sizes.attention(
        qkv_bias=config.flag("attention_bias", default=True),
        out_bias=config.flag("attention_out_bias", default=False),
    )
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    return sizes.network(sizes.pre_norm(layer, attention, mlp) for layer in sizes.layers)
