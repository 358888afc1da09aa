"""SmolLM3's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows

__all__ = ["SmolLM3Config", "read_config", "rotated_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(ModelConfig):
    """A network in which some layers know no positions."""

    rotated_layers: tuple[bool, ...]
    """Per layer."""


def read_config(config: Fields) -> SmolLM3Config:
    """Every fourth layer knows no positions, unless `no_rope_layers` says otherwise: 1 where a layer is rotated."""
    bias = config.flag("attention_bias", default=False)
    values = decoder_fields(config, tied=True, theta=2000000.0)
    values |= {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": config.flag("mlp_bias", default=False)}
    layers = values["num_layers"]
    rotated = rotated_layers(config, layers)
    if config.flag("use_sliding_window", default=False):
        values["sliding_windows"] = layer_windows(config, layers, default=tuple(not each for each in rotated))
    return SmolLM3Config(**values, rotated_layers=rotated)


def rotated_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Per layer, from `no_rope_layers`: 1 where a layer is rotated; all but every fourth when it is not given.

    Raises:
        CheckpointError: It is no such list.
    """
    interval = config.integer("no_rope_layer_interval", default=4, minimum=1)
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise CheckpointError(f"{config.source}: no_rope_layers must be a list of {layers} 0s and 1s, is {rotated!r}")
    return tuple(map(bool, rotated))
