"""OLMo (Groeneveld et al. 2024): Llama with layer norms that have no weights, and bounded projections."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec, NormSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """The epsilon of norms is always 1e-5."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config)
    clip = config.number("clip_qkv", default=None, above=0.0)

    def norm(name: str) -> NormSpec:
        return sizes.layer_norm(name, has_weight=False, has_bias=False, eps=1e-5)

    attention = sizes.attention(bias=bias, clip=clip)
    layers = (sizes.pre_norm(layer, attention, norms=("norm", "norm"), norm=norm) for layer in sizes.layers)
    return sizes.network(layers, final_norm=norm("norm"))
