"""Gemma 2's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows

__all__ = ["Gemma2Config", "gemma2_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(ModelConfig):
    """A network with capped scores and logits."""

    query_pre_attn_scalar: float
    """Attention scores are divided by its root."""
    attention_soft_cap: float | None
    """c in score -> c * tanh(score / c)."""
    logits_soft_cap: float | None


def read_config(config: Fields) -> Gemma2Config:
    """Every other layer slides, from the first, unless `layer_types` says otherwise."""
    values = gemma2_fields(config)
    layers = values["num_layers"]
    values["sliding_windows"] = layer_windows(config, layers, default=tuple(i % 2 == 0 for i in range(layers)))
    return Gemma2Config(
        **values,
        attention_soft_cap=config.number("attn_logit_softcapping", default=None, above=0.0),
        logits_soft_cap=config.number("final_logit_softcapping", default=None, above=0.0),
    )


def gemma2_fields(config: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    config.fixed("use_bidirectional_attention", False)
    bias = config.flag("attention_bias", default=False)
    named = config.named(hidden_act="hidden_activation")
    values = decoder_fields(named, tied=True, head_dim=256, act="gelu_pytorch_tanh", acts={"gelu"})
    return {
        **values,
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "norms_per_layer": 4,
        "query_pre_attn_scalar": config.number("query_pre_attn_scalar", default=256.0, above=0.0),
    }
