"""Jamba (Lieber et al. 2024, arXiv:2403.19887): Mamba in most layers, attention in some, experts in some."""

from __future__ import annotations

from quire_models.jamba.config import JambaConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import Mixer, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.mamba1 import Mamba1Mixer
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

__all__ = ["JambaForCausalLM"]


def make_feed_forward(config: JambaConfig, layer: int, scope: Scope) -> SparseMoE | GatedMLP:
    """The experts of a layer, or the feed-forward network of one that has none."""
    hidden, inner, act = config.hidden_size, config.intermediate_size, config.hidden_act
    if not config.sparse_layers[layer]:
        return GatedMLP(scope, hidden, inner, act=act)
    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax")
    select = ExpertChoice(scope, config.num_experts, rule)
    router = Router(scope / "router", hidden, config.num_experts, select)
    experts = FusedExperts(scope / "experts", config.num_experts, hidden, inner, act=act)
    experts.accept_stacked(scope / "experts")
    return SparseMoE(router, experts)


def make_layer(config: JambaConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer, with attention or Mamba."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    mixer: Mixer
    if config.attention_layers[layer]:
        mixer = SelfAttention(config, layer, scope / "self_attn", rotated=False)
    else:
        mixer = Mamba1Mixer(scope / "mamba", config.mixer, layer)
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=mixer,
        feed_forward_norm=RMSNorm(scope / "pre_ff_layernorm", hidden, eps),
        feed_forward=make_feed_forward(config, layer, scope / "feed_forward"),
    )


class JambaForCausalLM(DecoderLM):
    """The Jamba network."""

    config: JambaConfig

    def __init__(self, config: JambaConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, norm="final_layernorm")
