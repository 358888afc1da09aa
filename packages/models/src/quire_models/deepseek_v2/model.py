"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, and experts chosen by a softmax in groups, beside shared ones."""

from __future__ import annotations

from quire_models.deepseek_v2.config import LatentMoEConfig
from quire_models.glm4_moe.model import GroupedMoELM
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

__all__ = ["DeepseekV2ForCausalLM"]


def make_feed_forward(config: LatentMoEConfig, layer: int, scope: Scope) -> SparseMoE | GatedMLP:
    """The experts of a layer, or the feed-forward network of one that has none."""
    hidden, act = config.hidden_size, config.hidden_act
    if not config.sparse_layers[layer]:
        return GatedMLP(scope, hidden, config.intermediate_size, act=act)
    rule = RoutingRule(
        top_k=config.num_experts_per_tok,
        scoring="softmax",
        scale=config.routed_scaling_factor,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
    )
    select = ExpertChoice(scope, config.num_experts, rule)
    router = Router(scope / "gate", hidden, config.num_experts, select)
    experts = FusedExperts(scope / "experts", config.num_experts, hidden, config.moe_intermediate_size, act=act)
    experts.accept_stacked(scope / "experts")
    shared = None
    if config.shared_intermediate_size:
        shared = GatedMLP(scope / "shared_experts", hidden, config.shared_intermediate_size, act=act)
    return SparseMoE(router, experts, shared)


def make_layer(config: LatentMoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = LatentAttention(config, layer, scope / "self_attn")
    return pre_norm_block(config, scope, attention, make_feed_forward(config, layer, scope / "mlp"))


class DeepseekV2ForCausalLM(GroupedMoELM):
    """The DeepSeek-V2 network."""

    def __init__(self, config: LatentMoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
