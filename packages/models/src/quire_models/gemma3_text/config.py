"""Gemma 3 (text)'s config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.gemma2.config import Gemma2Config, gemma2_fields
from quire_models.rope_config import RopeConfig, parse_rope

__all__ = ["Gemma3Config", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """A network whose sliding layers rotate by another base than the others."""

    local_rope: RopeConfig
    """Of the layers that slide; `rope` is of the others."""


def read_config(config: Fields) -> Gemma3Config:
    """Five sliding layers, then one of full attention, unless `layer_types` says otherwise."""
    values = gemma2_fields(config)
    layers, positions = values["num_layers"], config.integer("max_position_embeddings", minimum=1)
    period = config.integer("sliding_window_pattern", default=6, minimum=1)
    slides = tuple((layer + 1) % period != 0 for layer in range(layers))
    rope = parse_rope(config, max_position_embeddings=positions, theta=1e6, layers="full_attention")
    local = config.named(rope_theta="rope_local_base_freq", rope_scaling="-")
    values |= {
        "qk_norm": True,
        "sliding_windows": layer_windows(config, layers, default=slides),
        "rope": rope,
        "max_model_len": positions,
    }
    return Gemma3Config(
        **values,
        local_rope=parse_rope(local, max_position_embeddings=positions, layers="sliding_attention"),
        attention_soft_cap=config.number("attn_logit_softcapping", default=None, above=0.0),
        logits_soft_cap=config.number("final_logit_softcapping", default=None, above=0.0),
    )
