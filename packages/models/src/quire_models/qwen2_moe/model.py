"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with routed experts and one shared expert behind a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.linear import Linear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SharedExpert, SparseMoE
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_ops import RoutingRule

if TYPE_CHECKING:
    from quire_models.qwen3_next.config import Qwen3NextConfig

__all__ = ["Qwen2MoeForCausalLM", "make_moe"]


def make_moe(config: MoEConfig | Qwen3NextConfig, scope: Scope) -> SparseMoE:
    """The most probable experts, with the shared expert where the configuration has one."""
    hidden = config.hidden_size
    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax", renormalize=config.renormalize)
    select = ExpertChoice(scope, config.num_experts, rule)
    router = Router(scope / "gate", hidden, config.num_experts, select)
    experts = FusedExperts(
        scope / "experts", config.num_experts, hidden, config.moe_intermediate_size, act=config.hidden_act
    )
    experts.accept_stacked(scope / "experts")
    if not config.shared_intermediate_size:
        return SparseMoE(router, experts)
    shared = GatedMLP(scope / "shared_expert", hidden, config.shared_intermediate_size, act=config.hidden_act)
    gate = Linear(scope / "shared_expert_gate", hidden, 1, method=scope.plain_method)
    return SparseMoE(router, experts, SharedExpert(scope, shared, gate))


def make_qwen2_moe_layer(config: MoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer, with experts or without."""
    attention = SelfAttention(config, layer, scope / "self_attn")
    moe = make_moe(config, scope / "mlp") if config.sparse_layers[layer] else None
    return pre_norm_block(config, scope, attention, moe)


class Qwen2MoeForCausalLM(DecoderLM):
    """The Qwen2-MoE network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_qwen2_moe_layer)
