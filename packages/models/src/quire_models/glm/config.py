"""GLM's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Half of a head is rotated; query, key and value have biases."""
    values = decoder_fields(config, partial=0.5, eps=1.5625e-7, head_dim=128)
    return ModelConfig(**{**values, "qkv_bias": config.flag("attention_bias", default=True)})
