"""Nemotron-4 and Minitron (Parmar et al. 2024): squared ReLU, layer norms whose weights are stored less one."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec, NormSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Half of each head is rotated when it is not said otherwise."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config.named(rms_norm_eps="norm_eps"), act="relu2", acts=ACTIVATIONS, partial=0.5, eps=1e-5)
    attention = sizes.attention(bias=bias)
    mlp = sizes.mlp(names=("up_proj", "down_proj"), bias=config.flag("mlp_bias", default=False))

    def norm(name: str) -> NormSpec:
        return sizes.layer_norm(name, offset=1.0)

    layers = (sizes.pre_norm(layer, attention, mlp, norm=norm) for layer in sizes.layers)
    return sizes.network(layers, final_norm=norm("norm"))
