"""Granite's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["GraniteConfig", "granite_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """A network with constant factors at its joints."""

    embedding_multiplier: float
    attention_multiplier: float
    """Factor of the attention scores."""
    residual_multiplier: float
    """Factor of what each part adds to the residual stream."""
    logits_scaling: float
    """Divisor of the logits."""


def read_config(config: Fields) -> GraniteConfig:
    """All factors are 1 when they are not given."""
    return GraniteConfig(**granite_fields(config))


def granite_fields(config: Fields) -> dict[str, Any]:
    """The fields of a decoder with biases and factors."""
    bias = config.flag("attention_bias", default=False)
    return decoder_fields(config) | {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.flag("mlp_bias", default=False),
        "embedding_multiplier": config.number("embedding_multiplier", default=1.0),
        "attention_multiplier": config.number("attention_multiplier", default=1.0),
        "residual_multiplier": config.number("residual_multiplier", default=1.0),
        "logits_scaling": config.number("logits_scaling", default=1.0, above=0.0),
    }
