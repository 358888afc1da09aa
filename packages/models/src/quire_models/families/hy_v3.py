"""Hunyuan 3 (Tencent 2026): normalised heads, and experts scored by sigmoids and chosen with a bias, beside shared
ones."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.glm4_moe import grouped_moe
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """All layers but the first have experts, where `mlp_layer_types` does not say. Files call the parts of a mixture by
    names of their own, or by those of Transformers' class."""
    config.fixed("mlp_bias", False)
    sizes = decoder_sizes(config, head_dim=128, theta=11158840.0, eps=1e-5)
    named = config.named(
        n_routed_experts="num_experts", n_shared_experts="num_shared_experts", n_group="-", topk_group="-",
        routed_scaling_factor="router_scaling_factor", norm_topk_prob="-",
    )  # fmt: skip
    moe = grouped_moe(
        named.with_default("routed_scaling_factor", 2.826).with_default("n_shared_experts", 1),
        sizes,
        correction_bias="e_score_correction_bias",
    )
    behind_first = [layer > 0 for layer in sizes.layers]
    sparse = layer_kinds(config, "mlp_layer_types", sizes.num_layers, MLP_KINDS, behind_first)
    attention = sizes.attention(bias=config.flag("attention_bias", default=False), **sizes.head_norms())
    num_mtp = config.integer("num_nextn_predict_layers", default=0, minimum=0)
    extra = range(sizes.num_layers, sizes.num_layers + num_mtp)
    return sizes.network(
        (sizes.pre_norm(layer, attention, moe if sparse[layer] else None) for layer in sizes.layers),
        checkpoint=CheckpointNames(
            ignored_prefixes=tuple(f"model.layers.{layer}." for layer in extra),
            renamed=(
                (".mlp.router.gate.", ".mlp.gate."),
                (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
                (".mlp.shared_mlp.", ".mlp.shared_experts."),
            ),
        ),
    )
