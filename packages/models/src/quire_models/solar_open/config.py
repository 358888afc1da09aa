"""Config.json of Solar Open."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields
from quire_models.glm4_moe.config import GroupedMoEConfig, grouped_moe_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> GroupedMoEConfig:
    """Every layer has experts, and no other feed-forward network has a size."""
    decoder = decoder_fields(config.named(intermediate_size="moe_intermediate_size"), head_dim=128)
    values = grouped_moe_fields(config, decoder, dense_layers=0, renormalize=True)
    values |= {
        "qkv_bias": config.flag("attention_bias", default=False),
        "sparse_layers": (True,) * values["num_layers"],
    }
    return GroupedMoEConfig(**values)
