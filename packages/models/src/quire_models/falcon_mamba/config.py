"""Falcon Mamba's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.mamba.config import MambaConfig, read_mamba

__all__ = ["read_config"]


def read_config(config: Fields) -> MambaConfig:
    """Mamba's, with norms inside of the mixer."""
    return read_mamba(config, norms="plain")
