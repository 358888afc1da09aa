"""Jamba (Lieber et al. 2024, arXiv:2403.19887): Mamba in most layers, attention in some, experts in some."""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.jamba.config import JambaConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.mamba1 import Mamba1Mixer
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

__all__ = ["JambaForCausalLM"]


class JambaLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: JambaConfig, layer: int, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention: SelfAttention | None = None
        if config.attention_layers[layer]:
            self.attention = SelfAttention(config, layer, scope / "self_attn", rotated=False)
        else:
            self.mamba = Mamba1Mixer(scope / "mamba", config.mixer, layer)
        self.mlp_norm = RMSNorm(scope / "pre_ff_layernorm", hidden, eps)
        inner = scope / "feed_forward"
        self.mlp: SparseMoE | GatedMLP
        if config.sparse_layers[layer]:
            rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax")
            select = ExpertChoice(scope, config.num_experts, rule)
            router = Router(inner / "router", hidden, config.num_experts, select)
            experts = FusedExperts(
                inner / "experts", config.num_experts, hidden, config.intermediate_size, act=config.hidden_act
            )
            experts.accept_stacked(inner / "experts")
            self.mlp = SparseMoE(router, experts)
        else:
            self.mlp = GatedMLP(inner, hidden, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.input_norm(x)
        mixed = self.mamba(normed, batch) if self.attention is None else self.attention(normed, cos, sin, batch)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class JambaForCausalLM(RecurrentLM):
    """The Jamba network."""

    config: JambaConfig

    def __init__(self, config: JambaConfig, scope: Scope) -> None:
        super().__init__(config, scope, JambaLayer, RMSNorm, norm="final_layernorm")
