"""Phi's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import ACTIVATIONS, decoder_fields

__all__ = ["PhiConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(ModelConfig):
    """A network that may normalise its heads."""

    qk_layernorm: bool
    """Queries and keys are layer-normalised per head before they are rotated."""


def read_config(config: Fields) -> PhiConfig:
    """Biases everywhere, in the LM head too."""
    named = config.named(rms_norm_eps="layer_norm_eps")
    values = decoder_fields(named, act="gelu_new", acts=ACTIVATIONS, partial=0.5, eps=1e-5)
    qk_layernorm = config.flag("qk_layernorm", default=False)
    values |= {
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "mlp_gated": False,
        "norms_per_layer": 1,
        "norm_bias": True,
        "other_parameters": values["vocab_size"] + qk_layernorm * values["num_layers"] * 4 * values["head_dim"],
    }
    return PhiConfig(**values, qk_layernorm=qk_layernorm)
