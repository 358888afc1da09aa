"""Llama 4's text model (Meta 2025): attention within chunks, between them layers without positions, and experts.

Queries of layers that know no positions grow with the logarithm of theirs (Nakanishi 2025, scalable softmax), so that
attention over long contexts does not fade.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.layers.activations import activation
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts
from quire_models.layers.query_growth import QueryGrowth
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_models.llama4_text.config import Llama4Config
from quire_ops import ops

__all__ = ["Llama4ForCausalLM"]


class PlainNorm:
    """x [T, H, D] -> like x: an RMS norm of each head without a weight."""

    __slots__ = ("_eps", "_norm", "_ones")

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self._norm = scope.op(ops.rms_norm)
        self._ones = torch.ones(size, dtype=scope.dtype, device=scope.device)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x.contiguous(), self._ones, self._eps)
        return out


class WeightedInputMoE:
    """x [T, I] -> [T, I]: a token's weight scales what its experts get; beside them is a shared one."""

    __slots__ = ("_experts", "_router", "_shared")

    def __init__(self, config: Llama4Config, scope: Scope) -> None:
        hidden, inner, act = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        per_token = config.num_experts_per_tok

        sigmoid = activation(scope, "sigmoid")

        def select(logits: Tensor) -> tuple[Tensor, Tensor]:
            chosen, ids = torch.topk(logits, per_token, dim=-1)
            return ids, sigmoid(chosen)

        self._router = Router(scope / "router", hidden, config.num_experts, select)
        self._experts = FusedExperts(scope / "experts", config.num_experts, hidden, inner, act=act)
        self._experts.accept_stacked(scope / "experts", inputs_first=True)
        self._shared = GatedMLP(scope / "shared_expert", hidden, inner, act=act)

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self._router(x)
        scaled = (x[:, None] * weights[:, :, None].to(x.dtype)).flatten(0, 1)  # [T K, I]
        out = self._experts(scaled, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        return self._shared(x) + out.view(*ids.shape, -1).sum(dim=1)


def make_layer(config: Llama4Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    rotated, norms = config.rotated_layers[layer], None
    if rotated and config.normed_heads:
        norm = PlainNorm(scope, config.head_dim, config.rms_norm_eps)
        norms = HeadNorms(norm, norm, after_rotation=True)

    growth = None
    if config.attn_scale and not rotated:
        growth = QueryGrowth(config.attn_scale, config.floor_scale, config.max_model_len, scope.device, offset=1)
    attention = SelfAttention(
        config,
        layer,
        scope / "self_attn",
        rotated=rotated,
        interleaved=True,
        norms=norms,
        query_factor=growth,
        chunk_tokens=config.chunks[layer],
    )
    inner = scope / "feed_forward"
    if config.sparse_layers[layer]:
        return pre_norm_block(config, scope, attention, WeightedInputMoE(config, inner))
    mlp = GatedMLP(inner, config.hidden_size, config.intermediate_size, act=config.hidden_act)
    return pre_norm_block(config, scope, attention, mlp)


class Llama4ForCausalLM(DecoderLM):
    """Llama 4's text network."""

    def __init__(self, config: Llama4Config, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)
