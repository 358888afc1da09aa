"""Config.json of DeepSeek-V3, R1 and Kimi K2."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.deepseek_v2.config import LatentMoEConfig, latent_fields
from quire_models.glm4_moe.config import grouped_moe_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> LatentMoEConfig:
    """Experts are scored by sigmoids, and chosen with a bias."""
    config.fixed("topk_method", "noaux_tc")
    config.fixed("scoring_func", "sigmoid")
    config.fixed("moe_layer_freq", 1)
    values = grouped_moe_fields(config, latent_fields(config), dense_layers=3, renormalize=True)
    return LatentMoEConfig(**values)
