"""Persimmon's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["PersimmonConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersimmonConfig(ModelConfig):
    """A network that may normalise its heads."""

    qk_layernorm: bool


def read_config(config: Fields) -> PersimmonConfig:
    """Half of each head is rotated when it is not said otherwise."""
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    values = decoder_fields(named, act="relu2", acts=ACTIVATIONS, partial=0.5, eps=1e-5)
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    qk_layernorm = config.flag("qk_layernorm", default=True)
    values["other_parameters"] = qk_layernorm * values["num_layers"] * 4 * values["head_dim"]
    return PersimmonConfig(**values, qk_layernorm=qk_layernorm)
