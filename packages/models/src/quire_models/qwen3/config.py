"""Qwen3's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields
from quire_models.qwen2.config import qwen_windows

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """Heads are normalised; biases of the attention are an option."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config, head_dim=128)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True}
    values["sliding_windows"] = qwen_windows(config, values["num_layers"])
    return ModelConfig(**values)
