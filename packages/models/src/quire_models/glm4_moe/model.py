"""GLM-4.5 (GLM-4.5 Team 2025): experts scored by sigmoids and chosen in groups, beside a shared one.

Also what other families with this routing (DeepSeek-V3, sec. 2.1.2) are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from quire_models.glm4_moe.config import GroupedMoEConfig
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import DecoderLayer, SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import LEAST_SCORES, ExpertChoice
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_models.layers.routing import CorrectionBias, Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

__all__ = ["Glm4MoeForCausalLM", "GroupedMoELM", "make_feed_forward"]


def make_feed_forward(config: GroupedMoEConfig, layer: int, scope: Scope) -> SparseMoE | GatedMLP:
    """The experts of a layer, or the feed-forward network of one that has none."""
    hidden, act = config.hidden_size, config.hidden_act
    if not config.sparse_layers[layer]:
        return GatedMLP(scope, hidden, config.intermediate_size, act=act)
    bias = CorrectionBias(scope / "gate", config.num_experts)
    rule = RoutingRule(
        top_k=config.num_experts_per_tok,
        scoring="sigmoid",
        renormalize=config.renormalize,
        minimum=LEAST_SCORES,
        scale=config.routed_scaling_factor,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
        group_best=2,
    )
    select = ExpertChoice(scope, config.num_experts, rule, bias=bias)
    router = Router(scope / "gate", hidden, config.num_experts, select)
    experts = FusedExperts(scope / "experts", config.num_experts, hidden, config.moe_intermediate_size, act=act)
    experts.accept_stacked(scope / "experts")
    shared = None
    if config.shared_intermediate_size:
        shared = GatedMLP(scope / "shared_experts", hidden, config.shared_intermediate_size, act=act)
    return SparseMoE(router, experts, shared)


def make_layer(config: GroupedMoEConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer; heads are normalised where the configuration says so."""
    inner, eps = scope / "self_attn", config.rms_norm_eps
    norms = None
    if config.qk_norm:
        norms = HeadNorms(
            RMSNorm(inner / "q_norm", config.head_dim, eps), RMSNorm(inner / "k_norm", config.head_dim, eps)
        )
    attention = SelfAttention(config, layer, inner, norms=norms)
    return pre_norm_block(config, scope, attention, make_feed_forward(config, layer, scope / "mlp"))


class GroupedMoELM(DecoderLM):
    """A network of such layers."""

    config: GroupedMoEConfig

    def __init__(
        self,
        config: Any,
        scope: Scope,
        make: Callable[[Any, int, Scope], DecoderLayer] = make_layer,
    ) -> None:
        """Args:
        make: (config, index of the layer, scope of the layer) -> the layer.
        """
        super().__init__(config, scope, make)
        first = config.num_layers
        more = range(first, first + config.num_nextn_predict_layers)
        self._not_loaded = tuple(f"model.layers.{layer}." for layer in more)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Leaves out layers that predict further tokens."""
        return () if name.startswith(self._not_loaded) else ((name, tensor),)


class Glm4MoeForCausalLM(GroupedMoELM):
    """The GLM-4.5 network."""
