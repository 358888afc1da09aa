"""OLMo's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["OlmoConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(ModelConfig):
    """A network that may bound its projections."""

    clip_qkv: float | None
    """Queries, keys and values are clipped to this distance from zero."""


def read_config(config: Fields) -> OlmoConfig:
    """Norms have no weights."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config)
    # The one norm behind the layers that the ledger counts has no weights either.
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "norms_per_layer": 0}
    values |= {"rms_norm_eps": 1e-5, "other_parameters": -values["hidden_size"]}
    return OlmoConfig(**values, clip_qkv=config.number("clip_qkv", default=None, above=0.0))
