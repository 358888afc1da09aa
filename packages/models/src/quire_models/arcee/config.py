"""Arcee's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Every projection may have a bias."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config, act="relu2", acts=ACTIVATIONS, eps=1e-5)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": config.flag("mlp_bias", default=False)}
    return ModelConfig(**values, mlp_gated=False)
