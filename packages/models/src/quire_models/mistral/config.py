"""Mistral's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """One window for all layers."""
    values = decoder_fields(config)
    values["sliding_windows"] = layer_windows(config, values["num_layers"])
    return ModelConfig(**values)
