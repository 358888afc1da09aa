"""Config.json of GLM-4.5, and what other families with its routing have in common with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import decoder_fields
from quire_models.moe_config import MoEConfig, expert_counts

__all__ = ["GroupedMoEConfig", "grouped_moe_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMoEConfig(MoEConfig):
    """Experts in groups: a token chooses groups first. Shared experts are one network as wide as all of them."""

    routed_scaling_factor: float
    """Factor of the weights of a token's experts."""
    n_group: int
    topk_group: int
    """Groups that a token's experts may be of."""
    num_nextn_predict_layers: int = 0
    """Layers behind the last one in the checkpoint, which predict further tokens; not loaded."""


def read_config(config: Fields) -> GroupedMoEConfig:
    """The first layers have no experts; half of each head is rotated; heads may be normalised."""
    values = grouped_moe_fields(config, decoder_fields(config, partial=0.5), dense_layers=1, renormalize=True)
    values |= {
        "qkv_bias": config.flag("attention_bias", default=False),
        "qk_norm": config.flag("use_qk_norm", default=False),
    }
    return GroupedMoEConfig(**values)


def grouped_moe_fields(
    config: Fields, values: dict[str, Any], *, dense_layers: int, renormalize: bool
) -> dict[str, Any]:
    """Adds the experts to the fields of a decoder.

    Args:
        dense_layers: The class's default of `first_k_dense_replace`; `renormalize` likewise of `norm_topk_prob`.

    Raises:
        CheckpointError: Groups that do not divide the experts, or have too few of them.
    """
    num_experts, per_token = expert_counts(config, "n_routed_experts", "num_experts_per_tok")
    groups = config.integer("n_group", default=1, minimum=1)
    chosen = config.integer("topk_group", default=1, minimum=1)
    size = num_experts // groups
    if num_experts % groups or size < 2 or chosen > groups or chosen * size < per_token:
        raise CheckpointError(
            f"{config.source}: n_group ({groups}) must divide n_routed_experts ({num_experts}) into groups of two and "
            f"more, and topk_group ({chosen}) of them must have num_experts_per_tok ({per_token}) experts"
        )
    layers = values["num_layers"]
    dense = config.integer("first_k_dense_replace", default=dense_layers, minimum=0)
    inner = config.integer("moe_intermediate_size", minimum=1)
    return values | {
        "sparse_layers": tuple(layer >= dense for layer in range(layers)),
        "num_experts": num_experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inner,
        "shared_intermediate_size": inner * config.integer("n_shared_experts", default=0, minimum=0),
        "renormalize": config.flag("norm_topk_prob", default=renormalize),
        "routed_scaling_factor": config.number("routed_scaling_factor", default=1.0),
        "n_group": groups,
        "topk_group": chosen,
        "num_nextn_predict_layers": config.integer("num_nextn_predict_layers", default=0, minimum=0),
    }
