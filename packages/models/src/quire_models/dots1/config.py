"""Config.json of dots.llm1."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields, layer_windows
from quire_models.glm4_moe.config import GroupedMoEConfig, grouped_moe_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> GroupedMoEConfig:
    """Heads are normalised; the layers from `max_window_layers` on have windows."""
    bias = config.flag("attention_bias", default=False)
    values = grouped_moe_fields(config, decoder_fields(config), dense_layers=0, renormalize=False)
    first = config.integer("max_window_layers", default=62, minimum=0)
    slides = tuple(layer >= first for layer in range(values["num_layers"]))
    values |= {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "sliding_windows": layer_windows(config, values["num_layers"], default=slides),
    }
    return GroupedMoEConfig(**values)
