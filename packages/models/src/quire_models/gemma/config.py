"""Gemma's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """The activation "gelu" of the first releases means its tanh approximation."""
    config.fixed("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", default=False)
    named = config.named(hidden_act="hidden_activation") if config.get("hidden_activation") is not None else config
    values = decoder_fields(named, tied=True, head_dim=256, act="gelu_pytorch_tanh", acts={"gelu", "gelu_erf"})
    return ModelConfig(**{**values, "hidden_act": "gelu", "qkv_bias": bias, "attention_out_bias": bias})
