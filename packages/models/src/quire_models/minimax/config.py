"""MiniMax-Text-01's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.config_fields import decoder_fields
from quire_models.mixer_shapes import WeightCount
from quire_models.moe_config import expert_counts
from quire_models.recurrent_config import HybridConfig, gated_mlp_weights, hybrid_fields

__all__ = ["LightningShape", "MiniMaxConfig", "read_config"]

FACTORS = tuple(f"{part}_{of}_factor" for part in ("full_attn", "linear_attn", "mlp") for of in ("alpha", "beta"))
LAYER_TYPES = {"linear_attention": False, "full_attention": True}
"""Name of a layer's kind -> it attends to every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningShape:
    """A layer of lightning attention (see `MixerShape`)."""

    hidden_size: int
    num_heads: int
    head_dim: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`: queries, keys and values, and the scan's copies of them."""
        return 4 * self.inner_size + 2 * 6 * self.inner_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (StateTensor("kv", (self.num_heads, self.head_dim, self.head_dim), "float32"),)

    def weights(self, count: int) -> WeightCount:
        """Of `count` layers."""
        inner, hidden = self.inner_size, self.hidden_size
        return WeightCount(((3 * inner, hidden, count), (inner, hidden, count), (hidden, inner, count)), count * inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxConfig(HybridConfig):
    """Experts in every layer, as wide as `intermediate_size`. Factors of what a part took (alpha) and gave (beta)."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    full_attn_alpha_factor: float
    full_attn_beta_factor: float
    linear_attn_alpha_factor: float
    linear_attn_beta_factor: float
    mlp_alpha_factor: float
    mlp_beta_factor: float

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width` and `MoEConfig.inner_width`."""
        routed = self.num_experts_per_tok * (self.hidden_size + 2 * self.moe_intermediate_size)
        return max(routed + self.hidden_size, self.mixer_width)


def read_config(config: Fields) -> MiniMaxConfig:
    """Layers take turns, full attention first, where config.json does not say."""
    config.fixed("sliding_window")
    values = decoder_fields(config, theta=1e6, eps=1e-5)
    layers, hidden = values["num_layers"], values["hidden_size"]
    kinds = config.get("layer_types") or [("full", "linear")[layer % 2] + "_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name {' or '.join(LAYER_TYPES)} for each of {layers} layers, "
            f"is {kinds!r}"
        )
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    mixer = LightningShape(hidden_size=hidden, num_heads=values["num_heads"], head_dim=values["head_dim"])
    fields = hybrid_fields(values, mixer, [LAYER_TYPES[kind] for kind in kinds], kind="linear attention")
    experts = gated_mlp_weights(hidden, values["intermediate_size"], layers * num_experts)
    fields["weights"]["experts"] = WeightCount(experts.matrices, layers * hidden * num_experts)
    factors: dict[str, Any] = {name: config.number(name, default=1.0) for name in FACTORS}
    return MiniMaxConfig(
        **fields,
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=values["intermediate_size"],
        **factors,
    )
