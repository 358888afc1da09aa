"""Modules that only Inkling 2 has.

Shape legend: T tokens of the step, C channels, Hq query heads, Hkv key-value heads, D head dimension, R numbers that
mix profiles, K taps of a filter, B blocks of layers, Q mixtures, I width of the network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward
from quire_models.config import ModelConfig
from quire_models.families.inkling2 import (
    CappedMoESpec,
    ClippedAttentionSpec,
    Inkling2ConvolutionsSpec,
    Inkling2LayerSpec,
)
from quire_models.families.inkling_layers import AddedConvolution, RelativeBiases, accept_experts
from quire_models.families.step3p5_layers import LimitedExperts
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.moe import make_router
from quire_models.layers.norm import WeightlessRMSNorm, make_norm
from quire_models.layers.scope import Parameter, Scope
from quire_ops import PagedLayout, ops

__all__ = [
    "AttentionResidualLM",
    "BlockMixture",
    "CappedExperts",
    "CappedMoE",
    "ClippedAttention",
    "DynamicConvolution",
    "Inkling2Layer",
    "clipped",
]

_MIXTURE_EPS = 1e-6
_CONVOLVED = ("k_sconv", "v_sconv")


def clipped(x: Tensor, length: float, scale: Tensor | None = None) -> Tensor:
    """x [T, H, D], times scale [H, D], with no head longer than `length`; in float32 inside."""
    wide = x.float() if scale is None else x.float() * scale.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    result: Tensor = (wide * (length / (norm + 1e-6)).clamp_max(1.0)).to(x.dtype)
    return result


class DynamicConvolution:
    """Keys and values [T, C] float32 each -> both [T, 2 C] float32: each with a short convolution of it added, whose
    taps are learned for each channel and projected from a token for each head."""

    def __init__(self, scope: Scope, spec: Inkling2ConvolutionsSpec) -> None:
        """Args:
        scope: Scope of the attention.
        """
        self._spec = spec
        wide = dataclasses.replace(scope, dtype=torch.float32)
        self._convolve, self._linear = wide.op(ops.dynamic_conv1d), scope.op(ops.linear)
        taps, rows = spec.taps, spec.num_dynamic_heads * spec.taps
        self._static = [
            (scope / name).parameter("static_w", taps, spec.kv_size, dtype=torch.float32) for name in _CONVOLVED
        ]
        self._parameters = [(scope / name).parameter("weight_proj", rows, spec.hidden_size) for name in _CONVOLVED]
        self._weight: Tensor
        """[2 C, K]."""
        self._projections: list[Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        # Files have the tap of the token itself first, ops last.
        self._weight = torch.cat([part.take().flip(0) for part in self._static], dim=1).T.contiguous()
        self._projections = [parameter.take() for parameter in self._parameters]

    def __call__(self, x: Tensor, inputs: Sequence[Tensor], state: Tensor, layout: PagedLayout) -> Tensor:
        """Args:
        x: Keys and values side by side, [T, 2 C] float32.
        inputs: What keys and values were projected from, [T, I] each.
        """
        taps = self._spec.taps
        brought = [
            self._linear(each, weight, None).float() for each, weight in zip(inputs, self._projections, strict=True)
        ]
        dynamic = torch.cat(brought, dim=-1).unflatten(-1, (-1, taps)).flip(-1)  # [T, 2 Hkv, K]
        out: Tensor = self._convolve(x, self._weight, dynamic, state, layout)
        return (out + x) / math.sqrt(2 * taps + 1)


class ClippedAttention:
    """x [T, I] -> [T, I]: attention with biases by distance that each token mixes for itself, clipped heads, sinks and
    gates; queries, keys and values may be of inputs of their own."""

    def __init__(
        self, spec: ClippedAttentionSpec, convolutions: Inkling2ConvolutionsSpec, index: int, scope: Scope
    ) -> None:
        """Args:
        index: Number of its keys and values among the caches of a batch.
        scope: Scope of the attention itself.
        """
        self._spec = spec
        query, self._key, self._value, self._out = (Linear.of(scope, each) for each in spec.projections())
        beside = (Linear.of(scope, each) for each in spec.beside_queries())
        self._queries = MergedLinear(scope, query, *beside)
        self._dynamic: DynamicConvolution | None = None
        self._added: AddedConvolution | None = None
        if convolutions.num_dynamic_heads:
            self._dynamic = DynamicConvolution(scope, convolutions)
        else:
            taps, channels = convolutions.taps, dict.fromkeys(_CONVOLVED, spec.kv_size)
            self._added = AddedConvolution(scope, channels, taps, factor=(taps + 1) ** -0.5)
        self._attend, self._multiply = RelativeBiases(spec, index, scope), scope.op(ops.sigmoid_and_mul)
        self._value_norm = WeightlessRMSNorm(scope, spec.head_dim, spec.eps)
        self._parameters: list[Parameter] = [
            (scope / "q_l2_clip").parameter("scale", spec.num_heads, spec.head_dim),
            (scope / "rel_l2_clip").parameter("scale", spec.num_heads, spec.relative_size),
        ]
        self._query_scale: Tensor
        self._relative_scale: Tensor
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._query_scale, self._relative_scale = (each.take() for each in self._parameters)

    def __call__(self, inputs: Sequence[Tensor], state: Tensor, layout: PagedLayout, batch: ForwardBatch) -> Tensor:
        """Args:
        inputs: Of queries, keys and values, [T, I] each.
        state: Of the convolutions, [num_blocks, K - 1, 2 * Hkv * D] float32.
        layout: Where sequences have it.
        """
        spec = self._spec
        query, relative, gate, sinks = self._queries(inputs[0])
        both = torch.cat((self._key(inputs[1]), self._value(inputs[2])), dim=-1)
        if self._dynamic is not None:
            convolved = self._dynamic(both.float(), inputs[1:], state, layout)
        else:
            assert self._added is not None
            convolved = self._added(both.float(), state, layout)
        key, value = (part.unflatten(-1, (-1, spec.head_dim)) for part in convolved.to(both.dtype).chunk(2, dim=-1))
        self._attend.cache.write(clipped(key, spec.clip_length), self._value_norm(value), batch)
        query = clipped(query.unflatten(-1, (-1, spec.head_dim)), spec.clip_length, self._query_scale)
        relative = relative.unflatten(-1, (-1, spec.relative_size))
        relative = clipped(relative, spec.relative_clip_length, self._relative_scale)
        return self._out(self._multiply(gate.contiguous(), self._attend(query, relative, batch, sinks)))


class CappedExperts(LimitedExperts):
    """cap(gate, c) * sigmoid(gate) * cap(up, d), one expert after the other."""

    def __init__(self, spec: CappedMoESpec, scope: Scope) -> None:
        super().__init__(spec, scope)
        self._caps = spec.gate_cap, spec.up_cap

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        of_gate, of_up = self._caps
        wide, wide_up = gate.float(), up.float()
        capped = torch.tanh(wide / of_gate) * of_gate * torch.sigmoid(wide)
        return (capped * torch.tanh(wide_up / of_up) * of_up).to(gate.dtype)


class CappedMoE:
    """x [T, I] -> [T, I]: what the router's experts make of each token."""

    def __init__(self, spec: CappedMoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner = scope / spec.name
        wide = dataclasses.replace(inner, dtype=torch.float32)
        self._router = make_router(spec, wide, torch.float32)
        self._experts = CappedExperts(spec, inner / "experts")
        accept_experts(inner, spec, spec.num_experts)

    def __call__(self, x: Tensor) -> Tensor:
        return self._experts(x, *self._router(x.float()))


class BlockMixture:
    """Sums of the blocks before and of the own block, [T, I] each -> Q mixtures of them, [T, I] float32 each: every
    sum is normed, and weighed by its product with a query (attention residuals)."""

    def __init__(self, scope: Scope, count: int, size: int) -> None:
        """Args:
        count: Q.
        size: I.
        """
        shape = (size,) if count == 1 else (count, size)
        self._parameter, self._size = scope.parameter("query", *shape, dtype=torch.float32), size
        self._query: Tensor
        """[Q, I]."""
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._query = self._parameter.take().view(-1, self._size)

    def __call__(self, blocks: Sequence[Tensor], own: Tensor) -> tuple[Tensor, ...]:
        sums = torch.stack([each.float() for each in (*blocks, own)], dim=1)  # [T, B, I]
        sums = sums * torch.rsqrt(sums.square().mean(-1, keepdim=True) + _MIXTURE_EPS)
        scores = torch.einsum("tbi,qi->tqb", sums, self._query) * self._size**-0.5
        mixtures: tuple[Tensor, ...] = torch.einsum("tqb,tbi->tqi", torch.softmax(scores, dim=-1), sums).unbind(1)
        return mixtures


class Inkling2Layer:
    """The sum of the own block before the layer, [T, I] -> behind it: attention(mixture) and experts(mixture) are
    added, or begin a block."""

    def __init__(self, spec: Inkling2LayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its keys and values among the caches of a batch; the states of its convolutions are next.
        scope: Scope of the layer.
        """
        attention, convolutions = spec.mixers
        assert isinstance(attention, ClippedAttentionSpec)
        assert isinstance(convolutions, Inkling2ConvolutionsSpec)
        assert spec.feed_forward is not None
        assert spec.feed_forward_norm is not None
        hidden, taps = attention.hidden_size, convolutions.taps
        self.begins_block, self._index = spec.begins_block, index + 1
        count = spec.num_mixtures
        self.attention_input = BlockMixture(scope / "attention_input", count, hidden) if count else None
        self.feed_forward_input = BlockMixture(scope / "mlp_input", 1, hidden)
        *norms, self.feed_forward_norm = (make_norm(norm, scope) for norm in spec.norms)
        self.norms = norms if len(norms) == 3 else norms * 3
        self.is_split = len(norms) == 3
        self.attention = ClippedAttention(attention, convolutions, index, scope / attention.name)
        factor = (taps + 1) ** -0.5
        self.attention_convolution = AddedConvolution(scope, {"attn_sconv": hidden}, taps, factor=factor)
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self.feed_forward_convolution = AddedConvolution(scope, {"mlp_sconv": hidden}, taps, factor=factor)

    def __call__(self, x: Tensor, blocks: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
        """Args:
        blocks: Sums of the blocks before that of x, [T, I] each.
        """
        (of_attention, of_layer, of_feed_forward), layout = batch.states_of_layer(self._index)
        mixtures = (x,) if self.attention_input is None else self.attention_input(blocks, x)
        out = self.attention(self._normed(mixtures, x.dtype), of_attention, layout, batch)
        total = self.attention_convolution(out.float(), of_layer, layout)
        if self.begins_block:
            blocks = (*blocks, x)
        else:
            total = x.float() + total
        [mixture] = self.feed_forward_input(blocks, total)
        out = self.feed_forward(self.feed_forward_norm(mixture.to(x.dtype)))
        return (total + self.feed_forward_convolution(out.float(), of_feed_forward, layout)).to(x.dtype)

    def _normed(self, mixtures: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Inputs of queries, keys and values."""
        if not self.is_split:
            return [self.norms[0](mixtures[0].to(dtype))] * 3
        each = mixtures if len(mixtures) == 3 else [mixtures[0]] * 3
        return [norm(mixture.to(dtype)) for norm, mixture in zip(self.norms, each, strict=True)]


class AttentionResidualLM(DecoderLM):
    """The network. Drafters that read the residual stream before a layer get the sum of its block."""

    layers: list[Any]

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        self._final_input = BlockMixture(scope / f"{spec.body}.final_input", 1, spec.hidden_size)

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        self.use_adapters(batch.lora)
        x = self.embed(batch.input_ids, batch.positions, batch.lora, batch.media)
        blocks: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            self._tap(taps, i, x, None)
            before, x = x, layer(x, blocks, batch)
            if layer.begins_block:
                blocks.append(before)
        self._tap(taps, len(self.layers), x, None)
        [mixture] = self._final_input(blocks, x)
        hidden: Tensor = self.norm(mixture.to(x.dtype))
        return hidden
