"""Helium's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """The output projection never has a bias."""
    values = decoder_fields(config, head_dim=128, theta=100000.0, eps=1e-8)
    values["qkv_bias"] = config.flag("attention_bias", default=False)
    values["mlp_bias"] = config.flag("mlp_bias", default=False)
    return ModelConfig(**values)
