"""Mixtral's config.json."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields, layer_windows
from quire_models.moe_config import MIXTRAL_EXPERTS, MoEConfig, expert_counts

__all__ = ["read_config"]


def read_config(config: Fields) -> MoEConfig:
    """Every layer has experts, which are as wide as Mistral's feed-forward network."""
    values = decoder_fields(config, theta=1e6)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    layers = values["num_layers"]
    values["sliding_windows"] = layer_windows(config, layers)
    return MoEConfig(
        **values,
        sparse_layers=(True,) * layers,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        expert_names=MIXTRAL_EXPERTS,
    )
