"""Cohere (Command-R)'s config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields

__all__ = ["CohereConfig", "cohere_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(ModelConfig):
    """A network with scaled logits."""

    logit_scale: float
    """Factor of the logits."""
    use_qk_norm: bool
    """Queries and keys are layer-normalised per head, each head with a weight of its own."""


def read_config(config: Fields) -> CohereConfig:
    """Head norms are an option of Command-R+."""
    values = cohere_fields(config, theta=500000.0)
    use_qk_norm = config.flag("use_qk_norm", default=False)
    heads = values["num_heads"] + values["num_kv_heads"]
    values["other_parameters"] = use_qk_norm * values["num_layers"] * heads * values["head_dim"]
    return CohereConfig(**values, use_qk_norm=use_qk_norm)


def cohere_fields(config: Fields, *, theta: float) -> dict[str, Any]:
    """What Cohere and Cohere 2 have in common."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config.named(rms_norm_eps="layer_norm_eps"), tied=True, theta=theta, eps=1e-5)
    return {
        **values,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "norms_per_layer": 1,
        "logit_scale": config.number("logit_scale", default=0.0625),
    }
