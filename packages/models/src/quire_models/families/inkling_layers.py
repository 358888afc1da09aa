"""Modules that only Inkling has.

Shape legend: T tokens of the step, C channels, Hq query heads, Hkv key-value heads, D head dimension, R numbers that
mix profiles, E routed experts, S shared experts, K routed experts per token, I width of the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward
from quire_models.families.inkling import InklingLayerSpec, RelativeAttentionSpec, ScaledMLPSpec, SharedSinkMoESpec
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm, consumers_of
from quire_models.layers.attention import head_norms
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import FusedExperts
from quire_models.layers.norm import make_norm
from quire_models.layers.rope_and_cache import RopeAndCache
from quire_models.layers.routing import CorrectionBias, Router
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import RecurrentSpec
from quire_ops import PagedLayout, QuantizedTokens, ops

__all__ = [
    "AddedConvolution",
    "InklingLayer",
    "RelativeAttention",
    "RelativeBiases",
    "ScaledMLP",
    "SharedSinkMoE",
    "accept_experts",
    "position_growth",
]


class AddedConvolution:
    """x [T, C] float32 -> [T, C] float32: x and a short convolution of each of its channels, with a factor. Their
    filters are stored in one or several tensors."""

    def __init__(self, scope: Scope, channels: dict[str, int], taps: int, *, factor: float = 1.0) -> None:
        """Args:
        channels: Name of a module in this scope -> how many of the channels it has the filters of, in their order.
        factor: Of the sum.
        """
        wide = dataclasses.replace(scope, dtype=torch.float32)
        self._convolve, self._factor = wide.op(ops.causal_conv1d, taps=taps), factor
        self._parts = [
            (scope / name).parameter("weight", size, 1, taps, dtype=torch.float32) for name, size in channels.items()
        ]
        self._weight: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        # Kernels read it tap by tap.
        self._weight = torch.cat([part.take()[:, 0] for part in self._parts]).t().contiguous().t()

    def __call__(self, x: Tensor, state: Tensor, layout: PagedLayout) -> Tensor:
        """`state` [num_blocks, taps - 1, C]: see `quire_ops.recurrent`."""
        out: Tensor = self._convolve(x, self._weight, None, state, layout, activation=None)
        return out + x if self._factor == 1.0 else (out + x) * self._factor


def position_growth(positions: Tensor, floor: float, scale: float) -> Tensor:
    """[T] -> [T, 1, 1] float32: 1, and from `floor` tokens on 1 + scale * log(tokens / floor). In float64 before, since
    the last bit of torch's logarithms follows where in the step a number stands."""
    grown = torch.log(((positions + 1).double() / floor).clamp_min(1.0))
    return (1 + scale * grown).float()[:, None, None]


class RelativeBiases:
    """query [T, Hq, D], mixing numbers [T, Hq, R] -> [T, Hq * D]: attention to what is in the cache, with
    biases by distance; both inputs grow with the position where the network says so."""

    def __init__(self, spec: RelativeAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the keys and values among the caches of a batch.
        scope: Scope of the attention itself.
        """
        self._spec, self._index = spec, index
        self.cache = scope.attention(index, scale=spec.scale, sliding_window=spec.sliding_window)
        self._attend = scope.op(ops.relative_paged_attention)
        self._parameter = (scope / "rel_logits_proj").parameter("proj", spec.relative_size, spec.extent)
        self._profiles: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._profiles = self._parameter.take()

    def __call__(self, query: Tensor, relative: Tensor, batch: ForwardBatch, sinks: Tensor | None = None) -> Tensor:
        """`sinks` [T, Hq]: of each query one more score that has no value."""
        spec = self._spec
        if spec.growth_floor is not None:
            growth = position_growth(batch.positions, spec.growth_floor, spec.growth_scale)
            query, relative = ((part.float() * growth).to(part.dtype) for part in (query, relative))
        cache, places = batch.of_layer(self._index)
        attended: Tensor = self._attend(
            query,
            cache,
            places,
            scale=spec.scale,
            relative=relative,
            profiles=self._profiles,
            sliding_window=spec.sliding_window,
            sinks=sinks,
            kv_scale=self.cache.kv_scale,
        )
        return attended.flatten(1)


class RelativeAttention:
    """x [T, hidden_size] -> [T, hidden_size]: attention with biases by distance that each token mixes for itself, over
    convolved keys and values."""

    def __init__(self, spec: RelativeAttentionSpec, taps: int, index: int, scope: Scope) -> None:
        """Args:
        taps: Of the convolutions.
        index: Number of its keys and values among the caches of a batch.
        scope: Scope of the attention itself.
        """
        self._spec = spec
        query, key, value, out = (Linear.of(scope, each) for each in spec.projections())
        self._projections = MergedLinear(scope, query, key, value, Linear.of(scope, spec.relative()))
        self._out = out
        self._convolve = AddedConvolution(
            scope, dict.fromkeys(("k_sconv.conv1d", "v_sconv.conv1d"), spec.kv_size), taps
        )
        self._attend = RelativeBiases(spec, index, scope)
        self._write = RopeAndCache(self._attend.cache, None, head_norms(spec, scope))

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._projections.layers

    def __call__(self, x: Tensor | QuantizedTokens, state: Tensor, layout: PagedLayout, batch: ForwardBatch) -> Tensor:
        """Args:
        state: Of the convolutions, [num_blocks, taps - 1, 2 * Hkv * D] float32.
        layout: Where sequences have it.
        """
        spec = self._spec
        query, key, value, relative = self._projections(x)
        convolved = self._convolve(torch.cat((key, value), dim=-1).float(), state, layout).to(key.dtype)
        query = query.unflatten(-1, (-1, spec.head_dim))  # [T, Hq, D]
        key, value = (part.unflatten(-1, (-1, spec.head_dim)) for part in convolved.chunk(2, dim=-1))
        query = self._write(query, key, value, key, key, batch)  # no rotation
        return self._out(self._attend(query, relative.unflatten(-1, (-1, spec.relative_size)), batch))


class ScaledMLP:
    """x [T, I] -> [T, I]: a gated network, and a learned factor of what it gives."""

    def __init__(self, spec: ScaledMLPSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner = scope / spec.name
        self._network = GatedMLP(spec, inner)
        name, width = inner.prefix, spec.intermediate_size

        def split(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
            yield f"{name}gate_proj.weight", tensor[0::2]
            yield f"{name}up_proj.weight", tensor[1::2]

        inner.packed("w13_dn.weight", (2 * width, spec.hidden_size), split)
        self._parameter = inner.parameter("global_scale", 1)
        self._scale: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._scale = self._parameter.take()

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._network.consumers

    def __call__(self, x: Tensor | QuantizedTokens) -> Tensor:
        return self._network(x) * self._scale


def accept_stack(
    scope: Scope,
    spec: SparseMoESpec,
    name: str,
    roles: tuple[str, ...],
    count: int,
    *,
    first: int = 0,
    by_turns: bool = False,
    kind: str = "weight",
) -> None:
    """Checkpoints may bring some matrices of several experts in one tensor.

    Args:
        scope: Scope of the mixture.
        name: Of the tensor in it.
        roles: Names of the matrices of an expert, one behind the other.
        count: Number of the experts.
        first: Number of the first of them.
        by_turns: The rows of two matrices take turns instead.
        kind: What the tensor has of the matrices: "weight", or in MXFP8 the scales of 32 inputs each, "weight_scale".
    """
    size, inner = spec.hidden_size, spec.intermediate_size
    inputs = inner if roles == spec.names[2:] else size
    inputs = inputs if kind == "weight" else inputs // 32

    def split(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for expert, matrix in enumerate(tensor, start=first):
            parts = (matrix[0::2], matrix[1::2]) if by_turns else matrix.chunk(len(roles))
            for role, rows in zip(roles, parts, strict=True):
                yield f"{scope.prefix}experts.{expert}.{role}.{kind}", rows

    outputs = size if roles == spec.names[2:] else len(roles) * inner
    scope.packed(name, (count, outputs, inputs), split)


def accept_experts(scope: Scope, spec: SparseMoESpec, count: int) -> None:
    """Checkpoints may bring these matrices of all experts, and in MXFP8 their scales, as Transformers names them, or as
    published, where the rows of gate and up take turns."""
    pair, down = spec.names[:2], spec.names[2:]
    for kind, end, published_end in (("weight", "", ""), ("weight_scale", "_scale_inv", "_scale")):
        if kind != "weight" and scope.quantization is None:
            continue
        accept_stack(scope, spec, f"experts.gate_up_proj{end}", pair, count, kind=kind)
        accept_stack(scope, spec, f"experts.w13_weight{published_end}", pair, count, by_turns=True, kind=kind)
        accept_stack(scope, spec, f"experts.down_proj{end}", down, count, kind=kind)
        accept_stack(scope, spec, f"experts.w2_weight{published_end}", down, count, kind=kind)


class SharedSinkMoE:
    """x [T, I] -> [T, I]: what the chosen experts and the shared ones make of each token, all weighed by the router."""

    def __init__(self, spec: SharedSinkMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner, self._spec = scope / spec.name, spec
        gate = inner / spec.router
        self._bias = CorrectionBias(gate, "e_score_correction_bias", spec.num_routed)
        self._parameter = gate.parameter("global_scale", 1, dtype=torch.float32)
        self._sigmoid = activation(scope, "sigmoid")
        self._router = Router(gate, spec.hidden_size, spec.num_experts, self._select)
        self._experts = FusedExperts(spec, inner / "experts")
        self._accept(inner, spec)
        self._scale: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._scale = self._parameter.take() * self._spec.routing.scale

    def _accept(self, scope: Scope, spec: SharedSinkMoESpec) -> None:
        """Take stacked matrices of all routed experts, and of all shared ones."""
        gate, up, down = spec.names
        accept_experts(scope, spec, spec.num_routed)
        at, first, count = "shared_experts", spec.num_routed, spec.num_shared
        accept_stack(scope, spec, f"{at}.gate_proj", (gate,), count, first=first)
        accept_stack(scope, spec, f"{at}.up_proj", (up,), count, first=first)
        accept_stack(scope, spec, f"{at}.shared_w13_weight", (gate, up), count, first=first, by_turns=True)
        for name in ("down_proj", "shared_w2_weight"):
            accept_stack(scope, spec, f"{at}.{name}", (down,), count, first=first)

    def _select(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E + S] -> ids and weights [T, K + S]: of the K best experts, and of all shared ones."""
        spec = self._spec
        routed, shared, chosen = spec.num_routed, spec.num_shared, spec.routing.top_k - spec.num_shared
        scores = self._sigmoid(logits[:, :routed].clone())  # which may write in place
        best = (scores + self._bias.value).topk(chosen, dim=-1).indices
        every = torch.arange(routed, routed + shared, device=logits.device).expand(len(logits), -1)
        ids = torch.cat((best, every), dim=-1)
        # Shares of sigmoids, by their logarithms: the sigmoids themselves may all be 0.
        return ids, torch.softmax(F.logsigmoid(logits.gather(1, ids)), dim=-1) * self._scale

    def __call__(self, x: Tensor) -> Tensor:
        return self._experts(x, *self._router(x))


class InklingLayer:
    """x + conv(attention(norm(x))), then x + conv(feed_forward(norm(x)))."""

    def __init__(self, spec: InklingLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its keys and values among the caches of a batch; the states of its convolutions are next.
        scope: Scope of the layer.
        """
        attention, convolutions = spec.mixers
        assert isinstance(attention, RelativeAttentionSpec)
        assert isinstance(convolutions, RecurrentSpec)
        assert spec.input_norm is not None
        assert spec.feed_forward is not None
        assert spec.feed_forward_norm is not None
        hidden, taps = attention.hidden_size, convolutions.states[0].shape[0] + 1
        self._index = index + 1
        self.attention = RelativeAttention(attention, taps, index, scope / attention.name)
        self.input_norm = AddNorm(make_norm(spec.input_norm, scope), self.attention.consumers)
        self.attention_convolution = AddedConvolution(scope, {"attn_sconv.conv1d": hidden}, taps)
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self.feed_forward_norm = AddNorm(make_norm(spec.feed_forward_norm, scope), consumers_of(self.feed_forward))
        self.feed_forward_convolution = AddedConvolution(scope, {"mlp_sconv.conv1d": hidden}, taps)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        (of_attention, of_layer, of_feed_forward), layout = batch.states_of_layer(self._index)
        normed, stream = self.input_norm(x, residual)
        out = self.attention(normed, of_attention, layout, batch)
        out = self.attention_convolution(out.float(), of_layer, layout).to(x.dtype)
        normed, stream = self.feed_forward_norm(out, stream)
        out = self.feed_forward(normed)
        return self.feed_forward_convolution(out.float(), of_feed_forward, layout).to(x.dtype), stream
