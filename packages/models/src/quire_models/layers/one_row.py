"""A decoder layer of one row in few launches: its norms, gate and additions of the residual are parts of its products.

Reading weights is what a decode of one request takes; each launch besides costs a GPU microseconds. Knows attention,
gated networks and their plain weights; does not know what a backend makes of them.

Shape legend: T tokens of the step, D rotated dimensions of a head.
"""

from __future__ import annotations

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.attention import SelfAttention
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_ops import GATED_ACTIVATIONS, ops

__all__ = ["OneRowLayer"]


class OneRowLayer:
    """y = x + attention(norm(x)), then y + feed_forward(norm(y)), for x [1, hidden_size]: the products are ops
    `norm_linear` and `linear_add`."""

    __slots__ = ("_attention", "_down", "_gate_and_up", "_linear_add", "_linears", "_network", "_norm_linear",
                 "_norms", "_out", "_qkv")  # fmt: skip

    def __init__(self, attention: SelfAttention, network: GatedMLP, norms: tuple[RMSNorm, RMSNorm]) -> None:
        """Args:
        attention, network: With plain weights.
        norms: Before each of them.
        """
        scope = norms[0].scope
        self._attention, self._network, self._norms = attention, network, norms
        self._norm_linear, self._linear_add = scope.op(ops.norm_linear), scope.op(ops.linear_add)
        self._linears = (*attention.qkv.layers, attention.o_proj, *network.gate_and_up.layers, network.down_proj)
        qkv, gate_and_up = attention.qkv.plain_weights, network.gate_and_up.plain_weights
        assert qkv is not None
        assert gate_and_up is not None
        self._qkv, self._gate_and_up = qkv, gate_and_up
        out, down = attention.o_proj.plain(), network.down_proj.plain()
        assert out is not None
        assert down is not None
        self._out, self._down = (out, attention.o_proj.bias), (down, network.down_proj.bias)

    @classmethod
    def bind(cls, attention: object, network: object, *norms: object) -> OneRowLayer | None:
        """The layer of these parts, once they are loaded; None where they are of other kinds, their weights are kept in
        other forms or shared among ranks, or no backend has the ops."""
        if type(attention) is not SelfAttention or type(network) is not GatedMLP:
            return None
        before_attention, before_network = norms
        if not isinstance(before_attention, RMSNorm) or not isinstance(before_network, RMSNorm):
            return None
        scope = before_attention.scope
        joined = (attention.qkv, network.gate_and_up)
        if scope.tp_group is not None or not network.takes_plain_rows or any(x.plain_weights is None for x in joined):
            return None
        if any(layer.plain() is None for layer in (attention.o_proj, network.down_proj)):
            return None
        fused = [scope.choose(op).name for op in (ops.norm_linear, ops.linear_add)]
        apart = [scope.choose(op).name for op in (ops.linear, ops.rms_norm, GATED_ACTIVATIONS[network.act])]
        if len({*fused, *apart}) != 1:
            return None
        return cls(attention, network, (before_attention, before_network))

    @property
    def is_adapted(self) -> bool:
        """Whether something is added to a product in this step."""
        return any(layer.is_adapted for layer in self._linears)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [1, hidden_size], the residual stream; cos and sin [1, 1, D] -> likewise, of its own memory."""
        before_attention, before_network = self._norms
        projected = self._norm_linear(x, before_attention.weight, before_attention.eps, *self._qkv, None)
        attended = self._attention.attend(self._attention.qkv.split(projected), cos, sin, batch)
        x = self._linear_add(attended, *self._out, x)
        inner = self._norm_linear(x, before_network.weight, before_network.eps, *self._gate_and_up, self._network.act)
        return self._linear_add(inner, *self._down, x)
