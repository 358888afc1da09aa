"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624) and Nemotron 3: layers of one part each, Mamba-2, attention without
positions, feed-forward networks without a gate, or experts of that kind, which may work on a projection.

Shape legend: T tokens of the step, E experts, K experts per token, I what experts take, M width within an expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from quire_models.layers.activations import activation
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import LEAST_SCORES, ExpertChoice
from quire_models.layers.linear import Linear
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.routing import CorrectionBias, Router
from quire_models.layers.scope import Scope
from quire_models.nemotron_h.config import ATTENTION, MAMBA, MOE, NemotronHConfig
from quire_ops import RoutingRule

__all__ = ["NemotronHForCausalLM"]

NAMES = ("up_proj", "down_proj")


class UngatedExperts:
    """(x [T, I], topk_ids, topk_weights [T, K]) -> [T, I]: the weighted sum of each token's down(act(up(x)))."""

    def __init__(self, scope: Scope, num_experts: int, size: int, inner: int, act: str) -> None:
        scope = dataclasses.replace(scope, adapters=None)  # as `FusedExperts`
        self.up = [Linear(scope / str(expert) / "up_proj", size, inner) for expert in range(num_experts)]
        self.down = [Linear(scope / str(expert) / "down_proj", inner, size) for expert in range(num_experts)]
        self.act = activation(scope, act)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            rows, slots = torch.where(topk_ids == expert)
            result = self.down[expert](self.act(self.up[expert](x[rows])))
            out.index_add_(0, rows, result.float() * topk_weights[rows, slots, None])
        return out.to(x.dtype)


class NemotronHMoE:
    """x [T, hidden_size] -> the same: what the router's experts make of it, and the network that every token uses."""

    def __init__(self, config: NemotronHConfig, scope: Scope) -> None:
        hidden, taken, act = config.hidden_size, config.expert_input_size, config.hidden_act
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
        self.router = Router(scope / "gate", hidden, config.num_experts, select)
        self.experts = UngatedExperts(
            scope / "experts", config.num_experts, taken, config.moe_intermediate_size, config.hidden_act
        )
        self.around: tuple[Linear, Linear] | None = None
        if taken != hidden:
            self.around = (
                Linear(scope / "fc1_latent_proj", hidden, taken, bias=config.mlp_bias),
                Linear(scope / "fc2_latent_proj", taken, hidden, bias=config.mlp_bias),
            )
        inner = config.shared_intermediate_size
        self.shared = MLP(scope / "shared_experts", hidden, inner, act=act, bias=config.mlp_bias, names=NAMES)

    def __call__(self, x: Tensor) -> Tensor:
        topk_ids, topk_weights = self.router(x)
        if self.around is None:
            return self.experts(x, topk_ids, topk_weights) + self.shared(x)
        down, up = self.around
        return up(self.experts(down(x), topk_ids, topk_weights)) + self.shared(x)


def make_layer(config: NemotronHConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer: x + part(norm(x))."""
    kind, inner, hidden = config.pattern[layer], scope / "mixer", config.hidden_size
    norm = RMSNorm(scope / "norm", hidden, config.rms_norm_eps)
    if kind == MAMBA:
        mamba = Mamba2Mixer(inner, config.mixer, config.cache_index(inner.prefix[:-1]))
        return SequentialBlock(input_norm=norm, mixer=mamba)
    if kind == ATTENTION:
        attention = SelfAttention(config, config.cache_index(inner.prefix[:-1]), inner, rotated=False)
        return SequentialBlock(input_norm=norm, mixer=attention)
    if kind == MOE:
        return SequentialBlock(feed_forward_norm=norm, feed_forward=NemotronHMoE(config, inner))
    act, bias = config.hidden_act, config.mlp_bias
    mlp = MLP(inner, hidden, config.intermediate_size, act=act, bias=bias, names=NAMES)
    return SequentialBlock(feed_forward_norm=norm, feed_forward=mlp)


class NemotronHForCausalLM(DecoderLM):
    """The Nemotron-H network."""

    config: NemotronHConfig

    def __init__(self, config: NemotronHConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer, body="backbone", embedding="embeddings", norm="norm_f")

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Leaves out layers that predict further tokens."""
        return () if name.startswith("mtp.") else ((name, tensor),)
