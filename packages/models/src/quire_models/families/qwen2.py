"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on query, key and value, windows in some layers; and Qwen3
(Yang et al. 2025), with normalised heads, and no bias by default."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["qwen_windows", "spec", "spec_of_qwen3"]


def spec(config: Fields) -> NetworkSpec:
    """Query, key and value always have a bias."""
    sizes = decoder_sizes(config)
    windows = qwen_windows(config, sizes.num_layers)
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(qkv_bias=True, sliding_window=window))
        for layer, window in enumerate(windows)
    )


def spec_of_qwen3(config: Fields) -> NetworkSpec:
    """Each query and key head is normalised before it is rotated."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config, head_dim=128)
    norms = sizes.head_norms()
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(bias=bias, sliding_window=window, **norms))
        for layer, window in enumerate(qwen_windows(config, sizes.num_layers))
    )


def qwen_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Windows are asked for by a flag, and begin at a layer where `layer_types` does not name each."""
    if not config.flag("use_sliding_window", default=False):
        return (None,) * layers
    first = config.integer("max_window_layers", default=28, minimum=0)
    return layer_windows(config, layers, default=tuple(layer >= first for layer in range(layers)))
