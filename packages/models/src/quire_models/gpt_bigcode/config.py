"""StarCoder (GPTBigCode)'s config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.gpt2.config import gpt2_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """One key-value head for all query heads, or one for each."""
    config.fixed("add_cross_attention", False)
    config.fixed("scale_attn_weights", True)
    values = gpt2_fields(config, act="gelu_pytorch_tanh")
    if config.flag("multi_query", default=True):
        values["num_kv_heads"] = 1
    return ModelConfig(**values)
