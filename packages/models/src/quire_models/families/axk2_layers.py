"""Modules of A.X K2.

Shape legend: T tokens of the step, H heads, V of a head's value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_models.families.axk2 import GatedNormSpec, ZeroedGroupsSpec
from quire_models.families.deepseek_v32_layers import SparseLatentAttention
from quire_models.layers.activations import activation
from quire_models.layers.linear import Linear
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import RMSNorm
from quire_models.layers.routing import ExpertChoice, choose_experts
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["GatedLatentAttention", "GatedRMSNorm", "ZeroedGroupsMoE"]


class GatedRMSNorm:
    """x [T, size] -> like x: y * sigmoid(W2 silu(W1 y)), where y is the RMS norm of x."""

    def __init__(self, spec: GatedNormSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the norm itself.
        """
        plain = scope.plain_method
        self._norm = RMSNorm(scope / "norm", spec.size, spec.eps)
        self._down = Linear(scope / "mlp" / "fc1", spec.size, spec.rank, method=plain, is_replicated=True)
        self._up = Linear(scope / "mlp" / "fc2", spec.rank, spec.size, method=plain, is_replicated=True)
        self._act, self._gate = activation(scope, "silu"), scope.op(ops.sigmoid_and_mul)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._norm(x)
        gated: Tensor = self._gate(self._up(self._act(self._down(y))), y)
        return gated


class GatedLatentAttention(SparseLatentAttention):
    """x [T, hidden_size] -> [T, hidden_size]; what heads give has gates."""

    is_gated = True

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows no gates here."""

    def _gated_queries(
        self, latent: Tensor, down: Tensor, beside: list[Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        both = self._query(torch.cat((latent, down), dim=-1)).unflatten(-1, (self._spec.num_heads, -1))
        query, gate = both.split((self._spec.head_dim, self._spec.v_head_dim), dim=-1)
        return self._absorb_key(query, cos, sin), gate.flatten(1)


class ZeroedGroupsMoE(SparseMoE):
    """x [T, hidden_size] -> [T, hidden_size]; see `ZeroedGroupsSpec`."""

    __slots__ = ("_sigmoid", "choice")

    def __init__(self, spec: ZeroedGroupsSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        super().__init__(spec, scope)
        assert isinstance(self.router.select, ExpertChoice)
        self.choice, self._sigmoid = self.router.select, activation(scope, "sigmoid")
        self.router.select = self._choose

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, self.choice.bias, self.choice.rule, self._sigmoid, outside=0.0)
