"""mBART's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.bart.config import BartConfig, bart_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> BartConfig:
    """Norms stand before the parts."""
    return bart_fields(config, norms_first=True)
