"""Apertus's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """The activation has two learned weights in each layer."""
    config.fixed("hidden_act", "xielu")
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config.named(hidden_act="-"), theta=12000000.0, eps=1e-5)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True, "hidden_act": "xielu"}
    return ModelConfig(**values, mlp_gated=False, other_parameters=2 * values["num_layers"])
