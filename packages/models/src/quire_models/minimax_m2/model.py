"""MiniMax-M2 (MiniMax 2025): experts scored by sigmoids; queries and keys are normalised over all heads at once."""

from __future__ import annotations

from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import LEAST_SCORES, ExpertChoice
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.routing import CorrectionBias, Router
from quire_models.layers.scope import Scope
from quire_models.moe_config import MoEConfig
from quire_models.olmoe.model import make_attention
from quire_ops import RoutingRule

__all__ = ["MiniMaxM2ForCausalLM"]


def make_moe(config: MoEConfig, scope: Scope) -> SparseMoE:
    """The best experts by score and bias, their scores made to sum to one."""
    bias = CorrectionBias(scope, config.num_experts)
    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="sigmoid", renormalize=True, minimum=LEAST_SCORES)
    select = ExpertChoice(scope, config.num_experts, rule, bias=bias)
    router = Router(scope / "gate", config.hidden_size, config.num_experts, select)
    experts = FusedExperts(
        scope / "experts",
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        act=config.hidden_act,
        names=("w1", "w3", "w2"),
    )
    return SparseMoE(router, experts)


def make_layer(config: MoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = make_attention(config, layer, scope / "self_attn")
    return pre_norm_block(config, scope, attention, make_moe(config, scope / "block_sparse_moe"))


class MiniMaxM2ForCausalLM(DecoderLM):
    """The MiniMax-M2 network."""

    def __init__(self, config: MoEConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
