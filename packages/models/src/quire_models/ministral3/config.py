"""Ministral 3's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows

__all__ = ["Ministral3Config", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(ModelConfig):
    """A network whose queries grow with their position."""

    query_scaling_beta: float
    """b in 1 + b * log(1 + floor(position / original context)); 0 for queries as they are."""


def read_config(config: Fields) -> Ministral3Config:
    """One window for all layers, usually none."""
    values = decoder_fields(config, head_dim=128, eps=1e-5)
    rope = Fields(config.get("rope_parameters") or {}, f"{config.source}: rope_parameters")
    values["sliding_windows"] = layer_windows(config, values["num_layers"])
    beta = rope.number("llama_4_scaling_beta", default=0.0)
    if beta and not values["rope"].original_max_position_embeddings:
        raise CheckpointError(f"{rope.source}: llama_4_scaling_beta needs original_max_position_embeddings")
    return Ministral3Config(**values, query_scaling_beta=beta)
