"""Mixtral (Jiang et al. 2024): Mistral with experts in the place of every feed-forward network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_ops import RoutingRule

if TYPE_CHECKING:
    from quire_models.minimax.config import MiniMaxConfig

__all__ = ["MixtralForCausalLM"]


def make_moe(config: MoEConfig | MiniMaxConfig, scope: Scope, mlp: Scope) -> SparseMoE:
    """The two most probable experts of eight, their probabilities made to sum to one.

    Args:
        scope: Where the files keep experts one by one.
        mlp: Where they keep them stacked.
    """
    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax", renormalize=True)
    select = ExpertChoice(scope, config.num_experts, rule)
    router = Router(scope / "gate", config.hidden_size, config.num_experts, select)
    experts = FusedExperts(
        scope / "experts",
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        act=config.hidden_act,
        names=("w1", "w3", "w2"),
    )
    experts.accept_stacked(mlp / "experts")
    mlp.packed("gate.weight", router.shape, lambda tensor: [(router.name, tensor)])
    return SparseMoE(router, experts)


def make_mixtral_layer(config: MoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = SelfAttention(config, layer, scope / "self_attn")
    moe = make_moe(config, scope / "block_sparse_moe", scope / "mlp")
    return pre_norm_block(config, scope, attention, moe)


class MixtralForCausalLM(DecoderLM):
    """The Mixtral network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_mixtral_layer)
