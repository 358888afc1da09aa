"""Config.json of MiniMax-M2."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import decoder_fields
from quire_models.moe_config import MIXTRAL_EXPERTS, MoEConfig, expert_counts

__all__ = ["read_config"]


def read_config(config: Fields) -> MoEConfig:
    """Part of each head is rotated: `rotary_dim` of its dimensions, where the file has that."""
    size = config.integer("head_dim", default=128, minimum=1)
    rotated = config.integer("rotary_dim", default=size, minimum=2)
    values = decoder_fields(config, head_dim=128, partial=rotated / size, theta=5e6)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    layers = values["num_layers"]
    values["other_parameters"] = layers * (values["num_heads"] + values["num_kv_heads"]) * values["head_dim"]
    return MoEConfig(
        **values,
        sparse_layers=(True,) * layers,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        expert_names=MIXTRAL_EXPERTS,
    )
