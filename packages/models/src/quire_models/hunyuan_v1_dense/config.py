"""Hunyuan (dense)'s config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields
from quire_models.rope_config import RopeConfig

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """A rotation of type "dynamic" with a fixed `alpha` is one with a larger base."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config, eps=1e-5)
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = Fields(config.get(name) or {}, f"{config.source}: {name}")
    if rope.get("alpha") is not None:
        size = values["head_dim"]
        stretch = rope.number("alpha", above=0.0) ** (size / (size - 2))
        values["rope"] = RopeConfig(theta=values["rope"].theta * stretch)
        values["max_model_len"] = config.integer("max_position_embeddings", minimum=1)
    return ModelConfig(**{**values, "qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True})
