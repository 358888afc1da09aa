"""UMT5's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.t5.config import T5Config, t5_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> T5Config:
    """Every layer has its own biases of distances."""
    gated = config.with_default("feed_forward_proj", "gated-gelu")
    return t5_fields(gated, scales_logits=True, has_bias_in_every_layer=True)
