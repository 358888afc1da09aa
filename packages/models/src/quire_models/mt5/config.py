"""mT5's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.t5.config import T5Config, t5_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> T5Config:
    """As T5 1.1, in other words for the same defaults."""
    return t5_fields(config.with_default("feed_forward_proj", "gated-gelu"), scales_logits=False)
