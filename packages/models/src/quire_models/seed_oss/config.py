"""Seed-OSS's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Query, key and value have biases, the output projection has one if asked for."""
    values = decoder_fields(config, head_dim=128)
    values |= {
        "qkv_bias": config.flag("attention_bias", default=True),
        "attention_out_bias": config.flag("attention_out_bias", default=False),
        "mlp_bias": config.flag("mlp_bias", default=False),
    }
    return ModelConfig(**values)
