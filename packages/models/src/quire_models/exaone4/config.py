"""EXAONE 4's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Three sliding layers, then one of full attention, unless `layer_types` says otherwise."""
    values = decoder_fields(config, eps=1e-5)
    layers = values["num_layers"]
    slides: tuple[bool, ...] | None = None
    if config.get("layer_types") is None and config.get("sliding_window") is not None:
        period = config.integer("sliding_window_pattern", default=4, minimum=1)
        slides = tuple((layer + 1) % period != 0 for layer in range(layers))
    values |= {"qk_norm": True, "sliding_windows": layer_windows(config, layers, default=slides)}
    return ModelConfig(**values)
