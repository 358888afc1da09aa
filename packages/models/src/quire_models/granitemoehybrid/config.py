"""Granite 4's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.granite.config import granite_fields
from quire_models.mixer_shapes import WeightCount, hybrid_mamba2
from quire_models.moe_config import expert_counts
from quire_models.recurrent_config import HybridConfig, gated_mlp_weights, hybrid_fields

__all__ = ["GraniteHybridConfig", "read_config"]

LAYER_TYPES = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}
"""Name of a layer's kind -> it attends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(HybridConfig):
    """Experts, or none, and a feed-forward network beside them; the factors of `GraniteConfig`."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width` and `MoEConfig.inner_width`."""
        routed = self.num_experts_per_tok * (self.hidden_size + 2 * self.moe_intermediate_size)
        return max(routed + self.hidden_size, 3 * self.shared_intermediate_size, self.mixer_width)


def read_config(config: Fields) -> GraniteHybridConfig:
    """Positions are rotated only where `position_embedding_type` says so."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    values = granite_fields(config)
    if config.get("position_embedding_type") != "rope":
        values["rotary_dim"] = 0
    hidden, layers = values["hidden_size"], values["num_layers"]
    num_experts, per_token = 0, 0
    if config.get("num_local_experts") != 0:
        num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    shared = config.integer("shared_intermediate_size", default=1024, minimum=1)
    fields = hybrid_fields(values, hybrid_mamba2(config, values), _attends(config, layers))
    experts = gated_mlp_weights(hidden, values["intermediate_size"], layers * num_experts)
    fields["weights"] |= {
        "MLP": gated_mlp_weights(hidden, shared, layers),
        "experts": WeightCount(experts.matrices, layers * hidden * num_experts),
    }
    return GraniteHybridConfig(
        **fields,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        shared_intermediate_size=shared,
    )


def _attends(config: Fields, layers: int) -> list[bool]:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name one of {', '.join(LAYER_TYPES)} for each of {layers} layers, "
            f"is {kinds!r}"
        )
    return [LAYER_TYPES[kind] for kind in kinds]
