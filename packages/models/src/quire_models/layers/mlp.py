"""Feed-forward networks, with a gate and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from quire_models.feed_forward_spec import GatedMLPSpec, MLPSpec
from quire_models.layers.activation_quant import ActivationQuant
from quire_models.layers.activations import activation, gated_activation
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.scope import Scope
from quire_models.shards import OutputShard, split_outputs
from quire_models.spec import LinearSpec
from quire_ops import GATED_ACTIVATIONS, GatedWeights, MLPWeights, QuantizedTokens, ops

__all__ = ["MLP", "GatedMLP"]


class InnerSplit:
    """How tensor-parallel ranks share out the inner width of a feed-forward network: each computes some of its numbers,
    activation included, before they are gathered."""

    __slots__ = ("_group", "_shard", "sizes")

    sizes: tuple[int, ...]
    """What each rank computes; empty where each computes all."""

    def __init__(self, scope: Scope, width: int) -> None:
        group = scope.tp_group
        sizes = None if group is None else split_outputs(width, group.size)
        self._group = None if sizes is None else group
        self.sizes = sizes or ()
        self._shard = None if group is None or sizes is None else OutputShard.of(sizes, group.rank)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has less than the whole."""
        return self._shard is not None

    def linear(self, scope: Scope, spec: LinearSpec) -> Linear:
        """The layer of a record that gives the rank's part of the inner width."""
        return Linear.of(scope, dataclasses.replace(spec, shard=self._shard))

    def gather(self, inner: Tensor) -> Tensor:
        """The rank's part [T, size] -> the whole [T, width]."""
        if self._group is None:
            return inner
        return self._group.all_gather(inner.contiguous(), dim=-1, sizes=self.sizes)


class GatedMLP:
    """x [T, size] -> [T, size]: down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    __slots__ = (
        "_act_and_mul",
        "_gated",
        "_quant",
        "_scope",
        "_split",
        "act",
        "down_proj",
        "gate_and_up",
        "gate_proj",
        "is_wide",
        "up_proj",
    )

    is_wide: bool
    """Gate and up are not rounded before they are multiplied: as in op `decoder_stack`, where that computes the network
    of one rank."""
    act: str
    """Name of the gate's activation."""
    gate_and_up: MergedLinear
    """Both products of x."""

    def __init__(self, spec: GatedMLPSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the network itself.
        """
        gate, up, down = spec.projections()
        self._split = InnerSplit(scope, spec.intermediate_size)
        self.gate_proj, self.up_proj = (self._split.linear(scope, each) for each in (gate, up))
        self.down_proj = Linear.of(scope, down)
        self.is_wide = False
        self.gate_and_up = MergedLinear(scope, self.gate_proj, self.up_proj)
        self.act = spec.act
        self._act_and_mul = gated_activation(scope, spec.act)
        # A scale for quantizing a token is of all its numbers, which a rank does not have here.
        quantizes = self.act in GATED_ACTIVATIONS and not self._split.is_sharded
        self._quant = ActivationQuant(scope, ops.gate_quant, [self.down_proj] if quantizes else [])
        self._scope = scope
        self._gated: Callable[[Tensor], Tensor] | None = None
        """Products and gate in one, where a backend has that and weights lie as it takes them."""
        scope.when_loaded(self._bind)

    def _bind(self) -> None:
        weights = self.gate_and_up.plain_weights
        if weights is None or self._quant.activation_scheme is not None:
            return
        if self.act not in GATED_ACTIVATIONS:
            return
        backend = self._scope.choose(ops.gated_linear)
        others = self._scope.choose(ops.linear), self._scope.choose(GATED_ACTIVATIONS[self.act])
        if any(other.name != backend.name for other in others):
            return
        self._scope.chosen.append(backend)
        weight, bias = weights
        self._gated = partial(backend.function, weight=weight, bias=bias, activation=self.act)

    @property
    def takes_plain_rows(self) -> bool:
        """Whether inner numbers are all computed here, and the layer behind them takes them as they are."""
        return self.act in GATED_ACTIVATIONS and not (self._split.is_sharded or self.is_wide)

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        if self._gated is not None and not self.gate_and_up.is_adapted:
            assert isinstance(x, Tensor)  # plain weights take it as it is
            return self.down_proj(self._split.gather(self._gated(x)))
        if self.is_wide:
            inner = self._act_and_mul(self.gate_proj.wide(x), self.up_proj.wide(x)).to(self._scope.dtype)
            return self.down_proj(self._split.gather(inner))
        gate, up = self.gate_and_up(x)
        if self._quant.activation_scheme is None:
            return self.down_proj(self._split.gather(self._act_and_mul(gate, up)))
        return self.down_proj(self._quant.function(gate, up, self.act, self._quant.activation_scheme))

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self.gate_and_up.layers

    def fused_weights(self) -> GatedWeights | None:
        """The network as data for op `decoder_stack`; None where a linear method keeps other forms of its weights."""
        weights = stack_weights(gate=self.gate_proj, up=self.up_proj, down=self.down_proj)
        if weights is None:
            return None
        return GatedWeights(**weights, activation=self.act, rank_widths=self._split.sizes)


class MLP:
    """x [T, size] -> [T, size]: down(act(up(x)))."""

    __slots__ = ("_act", "_act_name", "_split", "down", "up")

    def __init__(self, spec: MLPSpec, scope: Scope, act: Callable[[Tensor], Tensor] | None = None) -> None:
        """Args:
        scope: Scope of the network itself.
        act: The activation, which may write over what it is given; None for that of the record.
        """
        up, down = spec.projections()
        self._split = InnerSplit(scope, spec.intermediate_size)
        self.up, self.down = self._split.linear(scope, up), Linear.of(scope, down)
        self._act = act or activation(scope, spec.act)
        self._act_name = spec.act if act is None else None

    def fused_weights(self) -> MLPWeights | None:
        """The network as data for op `decoder_stack`; None where that op does not know its function or its weights."""
        weights = stack_weights(up=self.up, down=self.down)
        if weights is None or self._act_name is None:
            return None
        return MLPWeights(**weights, activation=self._act_name, rank_widths=self._split.sizes)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layer that takes x."""
        return (self.up,)

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        return self.down(self._split.gather(self._act(self.up(x))))
