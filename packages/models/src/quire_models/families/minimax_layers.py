"""Modules that only MiniMax-Text-01 has.

Shape legend: T tokens of the step, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, build_mixer
from quire_models.families.minimax import LightningAttentionSpec, MiniMaxLayerSpec
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.linear import Linear
from quire_models.layers.norm import RMSNorm, make_norm
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["LightningAttention", "MiniMaxLayer"]

NORM_EPS = 1e-6


class LightningAttention:
    """x [T, hidden_size] -> [T, hidden_size]: linear attention that forgets (Qin et al. 2024, arXiv:2401.04658).

    Each head keeps S [D, D]: S_t = exp(-slope) S_{t-1} + v_t k_t^T, and gives S_t q_t. That is a state space with one
    step size for all tokens, so op `mamba2_scan` computes it: values go in, keys write, queries read.
    """

    def __init__(self, spec: LightningAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache in a batch that has its states.
        scope: Scope of the attention itself.
        """
        hidden, inner, heads = spec.hidden_size, spec.inner_size, spec.num_heads
        self._index, self._heads = index, heads
        self.qkv_proj = Linear(scope / "qkv_proj", hidden, 3 * inner)
        self.output_gate = Linear(scope / "output_gate", hidden, inner)
        self.norm = RMSNorm(scope / "norm", inner, NORM_EPS)
        self.out_proj = Linear(scope / "out_proj", inner, hidden)
        self._act = activation(scope, spec.act)
        self._gate = scope.op(ops.sigmoid_and_mul)
        self._scan = scope.op(ops.mamba2_scan)
        self._decay = -head_slopes(heads, spec.depth).to(scope.device)
        self._zeros = torch.zeros(heads, device=scope.device)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self._index)
        query, key, value = self._act(self.qkv_proj(x)).unflatten(-1, (self._heads, -1)).chunk(3, dim=-1)  # [T, H, D]
        steps = torch.zeros(query.shape[:2], dtype=x.dtype, device=x.device)  # whatever they are, the limits make it 1
        out = self._scan(
            value, steps, self._decay, key, query, self._zeros, self._zeros, state, layout, dt_limit=(1.0, 1.0)
        )
        return self.out_proj(self._gate(self.output_gate(x), self.norm(out.flatten(1))))


def head_slopes(heads: int, depth: float) -> Tensor:
    """[H] float32: how fast each head forgets, those of late layers more slowly; `depth` from 0 to 1."""
    slopes = torch.pow(torch.tensor(2.0 ** (-8 / heads)), torch.arange(1, heads + 1))
    return slopes * (1 - depth + 1e-5)


class MiniMaxLayer:
    """y = norm(x), z = norm(a * y + b * mixer(y)), c * z + d * experts(z)."""

    def __init__(self, spec: MiniMaxLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its mixer's cache in a batch.
        scope: Scope of the layer.
        """
        assert spec.input_norm is not None
        assert spec.feed_forward is not None
        assert spec.feed_forward_norm is not None
        self.mixer = build_mixer(spec.mixers[0], index, scope)
        self.input_norm = AddNorm(make_norm(spec.input_norm, scope))
        self.feed_forward_norm = AddNorm(make_norm(spec.feed_forward_norm, scope))
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self._factors = (spec.alpha, spec.beta, spec.mlp_alpha, spec.mlp_beta)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        alpha, beta, mlp_alpha, mlp_beta = self._factors
        x, _ = self.input_norm(x, residual)
        x, _ = self.feed_forward_norm(self.mixer(x, cos, sin, batch) * beta, x * alpha)
        return self.feed_forward(x) * mlp_beta, x * mlp_alpha
