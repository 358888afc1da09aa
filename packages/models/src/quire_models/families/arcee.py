"""AFM (Arcee 2025): Llama with a squared ReLU instead of a gate."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Every projection may have a bias."""
    attention_bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config, act="relu2", acts=ACTIVATIONS, eps=1e-5)
    mlp = sizes.mlp(names=("up_proj", "down_proj"), bias=config.flag("mlp_bias", default=False))
    attention = sizes.attention(bias=attention_bias)
    return sizes.network(sizes.pre_norm(layer, attention, mlp) for layer in sizes.layers)
