"""Mistral Large 3 (Mistral AI 2025) and Mistral Small 4 (2026): latent attention whose queries grow with the
logarithm of their position, as Ministral 3's, and experts chosen by a softmax beside a shared one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.families.deepseek_v2 import latent_attention, whole_rotations
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.families.ministral3 import query_growth
from quire_models.mixer_spec import LatentSelfAttentionSpec, QueryGrowthSpec
from quire_models.spec import NetworkSpec, recast

__all__ = ["GrowingLatentSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingLatentSpec(LatentSelfAttentionSpec):
    """Latent attention whose queries have a factor that grows."""

    query_growth: QueryGrowthSpec
    built_by: ClassVar[str] = "quire_models.families.mistral4_layers:GrowingLatentAttention"


def spec(config: Fields) -> NetworkSpec:
    """Groups of experts, where there are any, are chosen by the sum of their two best."""
    sizes, attention = latent_attention(whole_rotations(config))
    if (growth := query_growth(config, sizes)) is not None:
        attention = recast(GrowingLatentSpec, attention, query_growth=growth)
    moe = grouped_moe(config, sizes, correction_bias="")
    moe = replace(moe, routing=replace(moe.routing, scoring="softmax"))
    return grouped_network(config, sizes, [attention] * sizes.num_layers, moe)
