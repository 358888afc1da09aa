"""OLMo 3's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config import ModelConfig
from quire_models.config_fields import layer_windows
from quire_models.olmo2.config import olmo2_fields
from quire_models.rope_config import RopeConfig, parse_rope

__all__ = ["Olmo3Config", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Config(ModelConfig):
    """A network whose sliding layers rotate otherwise than the others."""

    local_rope: RopeConfig
    """Of the layers that slide; `rope` is of the others."""


def read_config(config: Fields) -> Olmo3Config:
    """Three sliding layers, then one of full attention, unless `layer_types` says otherwise. Scaling of the rotation is
    for the latter only."""
    values = olmo2_fields(config, theta=500000.0)
    layers, positions = values["num_layers"], config.integer("max_position_embeddings", minimum=1)
    slides = tuple((layer + 1) % 4 != 0 for layer in range(layers))
    rope = parse_rope(config, max_position_embeddings=positions, theta=500000.0, layers="full_attention")
    local = config.named(rope_scaling="-")
    values |= {"sliding_windows": layer_windows(config, layers, default=slides), "rope": rope}
    values["max_model_len"] = rope.context_length(positions)
    local_rope = parse_rope(local, max_position_embeddings=positions, theta=500000.0, layers="sliding_attention")
    return Olmo3Config(**values, local_rope=local_rope)
