"""FlexOlmo's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.moe_config import MoEConfig
from quire_models.olmoe.config import read_config as read_olmoe_config

__all__ = ["read_config"]


def read_config(config: Fields) -> MoEConfig:
    """As OLMoE's, with another base of the rotation."""
    return read_olmoe_config(config, theta=500000.0)
