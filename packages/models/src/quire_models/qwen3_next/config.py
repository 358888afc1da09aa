"""Qwen3-Next's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.delta_config import GatedDeltaConfig, delta_fields
from quire_models.mixer_shapes import WeightCount
from quire_models.moe_config import expert_counts
from quire_models.qwen2_moe.config import sparse_layers
from quire_models.recurrent_config import gated_mlp_weights

__all__ = ["Qwen3NextConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(GatedDeltaConfig):
    """Experts, and a shared one, in the layers that are sparse. The fields are those of `MoEConfig`."""

    sparse_layers: tuple[bool, ...]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    renormalize: bool

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width` and `MoEConfig.inner_width`."""
        routed = self.num_experts_per_tok * (self.hidden_size + 2 * self.moe_intermediate_size)
        return max(3 * self.intermediate_size, routed + self.hidden_size, self.mixer_width)


def read_config(config: Fields) -> Qwen3NextConfig:
    """Defaults of the class; the experts' fields are Qwen3-MoE's."""
    values = delta_fields(config, intermediate_size=5632, value_heads=32)
    if config.get("num_experts") == 0:
        num_experts, per_token, sparse = 0, 0, (False,) * values["num_layers"]
    else:
        num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
        sparse = sparse_layers(config, values["num_layers"])
    hidden, num_sparse = values["hidden_size"], sum(sparse)
    inner = config.integer("moe_intermediate_size", default=512, minimum=1)
    shared = config.integer("shared_expert_intermediate_size", default=512, minimum=1)
    experts = gated_mlp_weights(hidden, inner, num_sparse * num_experts)
    values["weights"] |= {
        "MLP": gated_mlp_weights(hidden, values["intermediate_size"], values["num_layers"] - num_sparse),
        "experts": WeightCount(experts.matrices, num_sparse * hidden * (num_experts + 1)),
        "shared experts": gated_mlp_weights(hidden, shared, num_sparse),
    }
    return Qwen3NextConfig(
        **values,
        sparse_layers=sparse,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=inner,
        shared_intermediate_size=shared,
        renormalize=config.flag("norm_topk_prob", default=True),
    )
