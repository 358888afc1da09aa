"""The config.json of Qwen3.5's text networks."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.delta_config import GatedDeltaConfig, delta_fields
from quire_models.recurrent_config import gated_mlp_weights

__all__ = ["read_config"]


def read_config(config: Fields) -> GatedDeltaConfig:
    """Feed-forward networks in every layer. Text has one position per token, whatever `mrope_section` says."""
    values = delta_fields(config, intermediate_size=12288, value_heads=32)
    values["weights"]["MLP"] = gated_mlp_weights(
        values["hidden_size"], values["intermediate_size"], values["num_layers"]
    )
    return GatedDeltaConfig(**values)
