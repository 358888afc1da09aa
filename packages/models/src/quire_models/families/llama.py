"""Llama (Touvron et al. 2023; Llama 3: Grattafiori et al. 2024): grouped-query attention, rotary positions, SwiGLU."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Every projection may have a bias."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config)
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    return sizes.network(sizes.pre_norm(layer, sizes.attention(bias=bias), mlp) for layer in sizes.layers)
