"""Mistral (Jiang et al. 2023) and Ministral (Mistral AI 2024): Llama without biases, with a sliding window in every
layer, or in some."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Windows in the layers that `layer_types` names, in all of them without it."""
    sizes = decoder_sizes(config)
    windows = layer_windows(config, sizes.num_layers)
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(sliding_window=window)) for layer, window in enumerate(windows)
    )
