"""Qwen2's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows

__all__ = ["qwen_windows", "read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Query, key and value always have a bias."""
    values = decoder_fields(config)
    values |= {"qkv_bias": True, "sliding_windows": qwen_windows(config, values["num_layers"])}
    return ModelConfig(**values)


def qwen_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Windows are asked for by a flag, and begin at a layer where `layer_types` does not name each."""
    if not config.flag("use_sliding_window", default=False):
        return (None,) * layers
    first = config.integer("max_window_layers", default=28, minimum=0)
    return layer_windows(config, layers, default=tuple(layer >= first for layer in range(layers)))
