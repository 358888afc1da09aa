"""GLM-4.7-Flash (Z.ai 2026): latent attention as in DeepSeek-V3, and GLM-4.5's experts."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.spec import NetworkSpec

__all__ = ["MLP_KINDS", "spec"]

MLP_KINDS = {"dense": False, "sparse": True}
"""Name of a layer's feed-forward network in `mlp_layer_types` -> it has experts."""


def spec(config: Fields) -> NetworkSpec:
    """All layers but the first have experts, where `mlp_layer_types` does not say."""
    sizes, attention = latent_attention(config)
    behind_first = [layer > 0 for layer in sizes.layers]
    sparse = layer_kinds(config, "mlp_layer_types", sizes.num_layers, MLP_KINDS, behind_first)
    moe = grouped_moe(config, sizes)
    return grouped_network(config, sizes, [attention] * sizes.num_layers, moe, sparse=sparse)
