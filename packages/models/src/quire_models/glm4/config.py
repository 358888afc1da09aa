"""GLM-4 of 2025's config.json."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.glm.config import read_config as read_glm_config

__all__ = ["read_config"]


def read_config(config: Fields) -> ModelConfig:
    """As GLM, with twice as many norms."""
    return replace(read_glm_config(config), norms_per_layer=4)
