"""Config.json of Granite's mixtures with a shared network."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.granitemoe.config import GraniteMoEConfig
from quire_models.granitemoe.config import read_config as read_granitemoe_config

__all__ = ["read_config"]


def read_config(config: Fields) -> GraniteMoEConfig:
    """As granitemoe's."""
    return read_granitemoe_config(config)
