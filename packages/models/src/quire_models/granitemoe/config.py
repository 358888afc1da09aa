"""Config.json of Granite's mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.granite.config import granite_fields
from quire_models.moe_config import MoEConfig, expert_counts

__all__ = ["GraniteMoEConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoEConfig(MoEConfig):
    """Experts, and the constant factors of `GraniteConfig`."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def read_config(config: Fields) -> GraniteMoEConfig:
    """Every layer has experts; some files have a feed-forward network beside them that every token uses."""
    values = granite_fields(config)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    return GraniteMoEConfig(
        **values,
        sparse_layers=(True,) * values["num_layers"],
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        shared_intermediate_size=config.integer("shared_intermediate_size", default=0, minimum=0),
    )
