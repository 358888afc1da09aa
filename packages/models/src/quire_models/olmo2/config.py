"""OLMo 2's config.json."""

from __future__ import annotations

from typing import Any

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["olmo2_fields", "read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Queries and keys are normalised over all heads at once."""
    return ModelConfig(**olmo2_fields(config, theta=10000.0))


def olmo2_fields(config: Fields, *, theta: float) -> dict[str, Any]:
    """What OLMo 2 and 3 have in common."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config, theta=theta, eps=1e-5)
    heads = values["num_heads"] + values["num_kv_heads"]
    other = values["num_layers"] * heads * values["head_dim"]
    return {**values, "qkv_bias": bias, "attention_out_bias": bias, "other_parameters": other}
