"""Qwen3-MoE's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.moe_config import MoEConfig
from quire_models.qwen2_moe.config import qwen_moe_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> MoEConfig:
    """Heads are normalised; biases of the attention are an option."""
    bias = config.flag("attention_bias", default=False)
    values = qwen_moe_fields(config, head_dim=None, inner=768)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True}
    return MoEConfig(**values)
