"""Granite 3's mixtures of experts (IBM 2024): Granite with experts, chosen by their logits, in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from quire_models.granite.model import GraniteForCausalLM
from quire_models.granitemoe.config import GraniteMoEConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.fused import split_rows
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

if TYPE_CHECKING:
    from quire_models.granitemoehybrid.config import GraniteHybridConfig

__all__ = ["GraniteMoeForCausalLM"]


def make_moe(config: GraniteMoEConfig | GraniteHybridConfig, scope: Scope, shared_scope: Scope) -> SparseMoE:
    """The experts of the largest logits; their weights are the softmax over these."""
    hidden, act = config.hidden_size, config.hidden_act
    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax_of_chosen")
    select = ExpertChoice(scope, config.num_experts, rule)
    router = Router(scope / "router" / "layer", hidden, config.num_experts, select)
    experts = FusedExperts(scope / "experts", config.num_experts, hidden, config.moe_intermediate_size, act=act)
    experts.accept_stacked(scope, ("input_linear.weight", "output_linear.weight"))
    shared = None
    if config.shared_intermediate_size:
        shared = GatedMLP(shared_scope, hidden, config.shared_intermediate_size, act=act)
    return SparseMoE(router, experts, shared)


def make_granite_moe_layer(config: GraniteMoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = SelfAttention(config, layer, scope / "self_attn", scale=config.attention_multiplier)
    moe = make_moe(config, scope / "block_sparse_moe", scope / "shared_mlp")
    return pre_norm_block(config, scope, attention, moe, residual_factor=config.residual_multiplier)


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """The network of Granite 3's mixtures of experts."""

    config: GraniteMoEConfig

    def __init__(self, config: GraniteMoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_granite_moe_layer)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes gate and up of the shared network apart."""
        if ".shared_mlp." not in name:
            return ((name, tensor),)
        inner = self.config.shared_intermediate_size
        name = name.replace("output_linear", "down_proj")
        return split_rows(name, tensor, {"input_linear": {"gate_proj": inner, "up_proj": inner}})
