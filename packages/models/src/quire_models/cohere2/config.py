"""Cohere 2 (Command R7B, Command A)'s config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.cohere.config import CohereConfig, cohere_fields
from quire_models.config_fields import layer_windows

__all__ = ["read_config"]


def read_config(config: Fields) -> CohereConfig:
    """Three sliding layers, then one of full attention, unless `layer_types` says otherwise."""
    values = cohere_fields(config, theta=10000.0)
    period = config.integer("sliding_window_pattern", default=4, minimum=1)
    slides = tuple((layer + 1) % period != 0 for layer in range(values["num_layers"]))
    values["sliding_windows"] = layer_windows(config, values["num_layers"], default=slides)
    return CohereConfig(**values, use_qk_norm=False)
