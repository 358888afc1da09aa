"""ERNIE 4.5 (Baidu 2025): neighbouring dimensions are rotated; a bias helps to choose experts, beside shared ones."""

from __future__ import annotations

from quire_models.ernie4_5_moe.config import ErnieMoEConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.routing import CorrectionBias, Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

__all__ = ["Ernie4_5_MoeForCausalLM"]


def make_feed_forward(config: ErnieMoEConfig, layer: int, scope: Scope) -> SparseMoE | GatedMLP:
    """The experts of a layer, or the feed-forward network of one that has none."""
    hidden, act, has_bias = config.hidden_size, config.hidden_act, config.mlp_bias
    if not config.sparse_layers[layer]:
        return GatedMLP(scope, hidden, config.intermediate_size, act=act, bias=has_bias)
    bias = CorrectionBias(scope / "moe_statics", 1, config.num_experts)

    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax", renormalize=True, minimum=config.norm_min)
    select = ExpertChoice(scope, config.num_experts, rule, bias=bias)
    router = Router(scope / "gate", hidden, config.num_experts, select)
    experts = FusedExperts(scope / "experts", config.num_experts, hidden, config.moe_intermediate_size, act=act)
    experts.accept_stacked(scope / "experts")
    shared = None
    if config.shared_intermediate_size:
        shared_scope = scope / "shared_experts"
        shared = GatedMLP(shared_scope, hidden, config.shared_intermediate_size, act=act, bias=has_bias)
    return SparseMoE(router, experts, shared)


def make_layer(config: ErnieMoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = SelfAttention(config, layer, scope / "self_attn", interleaved=True)
    return pre_norm_block(config, scope, attention, make_feed_forward(config, layer, scope / "mlp"))


class Ernie4_5_MoeForCausalLM(DecoderLM):  # noqa: N801 (the name of the architecture)
    """The ERNIE 4.5 network."""

    def __init__(self, config: ErnieMoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, head_bias=config.mlp_bias)
