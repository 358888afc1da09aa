"""Modules that only DeepSeek-V4 has.

Shape legend: T tokens of the step, S residual streams, I hidden size, H heads of attention, D their dimension, N
windows that end in the step, E experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.deepseek_v4 import (
    CompressedEntriesSpec,
    CompressorSpec,
    DeepseekV4LayerSpec,
    DeepseekV4MoESpec,
    EntryIndexSpec,
    HashMoESpec,
    MixedStreamsSpec,
    WindowAttentionSpec,
)
from quire_models.families.hy_v4_layers import ClampedExperts, HyperDecoderLM, mixture
from quire_models.feed_forward_spec import GatedMLPSpec
from quire_models.layers.activations import activation, gated_activation
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.moe import make_router
from quire_models.layers.norm import WeightlessRMSNorm, make_norm
from quire_models.layers.rotary import Rotary
from quire_models.layers.routing import Router, sqrt_softplus
from quire_models.layers.scope import Scope
from quire_ops import PagedLayout, ops
from quire_ops.compressed_attention import entry_slots, window_ends

__all__ = ["DeepseekV4ForCausalLM", "DeepseekV4Layer", "DeepseekV4MoE", "WindowAttention"]

ENTRIES = 1
"""Number of the cache of all entries in a batch: it is the second one of the first layer."""


class Rotation(NamedTuple):
    """Cosines and signed sines of a layer."""

    cos: Tensor
    """[T, 1, D]."""
    sin: Tensor
    end_cos: Tensor
    """[N, 1, D], of the first positions of windows that end in the step."""
    end_sin: Tensor


class TrailingRotary:
    """Rotary embedding of the last dimensions of each head, neighbours being pairs: x [T, H, D] -> [T, H, D]. What
    comes back has the first of all pairs before the second ones; `back` undoes both."""

    def __init__(self, scope: Scope, rotary_dim: int) -> None:
        self._forth = Rotary(scope, rotary_dim, interleaved=True)
        self._back = Rotary(scope, rotary_dim)
        self._size = rotary_dim

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        plain, rotated = x[..., : -self._size], x[..., -self._size :]
        return torch.cat((plain, self._forth(rotated, cos, sin)), dim=-1)

    def back(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated the other way, pairs being neighbours again."""
        rotated = self._back(x[..., -self._size :], cos, -sin)
        pairs = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((x[..., : -self._size], pairs), dim=-1)


class Compressor:
    """Windows of tokens -> entries (sec. 2.3.1)."""

    def __init__(self, spec: CompressorSpec, scope: Scope, rotate: TrailingRotary) -> None:
        """Args:
        scope: Scope of the attention.
        """
        inner = scope / spec.name
        self.projections = [Linear.of(inner, each) for each in spec.projections()]
        self._norm, self._rotate = make_norm(spec.norm, inner), rotate
        self._bias = inner.parameter("position_bias", spec.rate, spec.row_width, dtype=torch.float32)
        self.bias: Tensor
        self._compress = scope.op(ops.compress_windows)
        self._write = scope.op(ops.write_latent_cache)
        self._spec = spec
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.bias = self._bias.take()

    def write(
        self, rows: Tensor, layout: PagedLayout, entries: Tensor, entry_layout: PagedLayout, rotation: Rotation
    ) -> None:
        """Write the entries of windows that end in the step.

        Args:
            rows: The window's cache, from its columns with values and gates on.
            entries: Their part of the entries' cache.
        """
        width = self._spec.row_width
        values, gates = rows[..., :width], rows[..., width : 2 * width]
        found = self._compress(values, gates, self.bias, layout, overlap=self._spec.overlaps)
        if not len(found):
            return
        found = self._rotate(self._norm(found)[:, None], rotation.end_cos, rotation.end_sin)[:, 0]
        slots = entry_slots(entry_layout, *window_ends(entry_layout, self._spec.rate), self._spec.rate)
        padded = F.pad(found, (0, slots.shape[1] * entries.shape[2] - found.shape[1]))
        self._write(padded.view(-1, entries.shape[2]), entries, slots.flatten())


class EntryIndex:
    """Which entries a token attends to (lightning indexer, eq. 13 to 17)."""

    def __init__(self, spec: EntryIndexSpec, attention: WindowAttentionSpec, scope: Scope) -> None:
        size = spec.compressor.size
        self._queries = Linear.of(scope, spec.projection(attention.q_lora_rank))
        self._rotate = TrailingRotary(scope, attention.rotary_dim)
        name = f"{spec.compressor.name}.scorer.weights_proj.weight"
        self._parameter = scope.parameter(name, spec.num_heads, attention.hidden_size, dtype=torch.float32)
        self._weights: Tensor
        self._score = dataclasses.replace(scope, dtype=torch.float32).op(ops.linear)
        self._find = scope.op(ops.compressed_topk)
        self._factor = spec.num_heads**-0.5 * size**-0.5
        self._spec = spec
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._weights = self._parameter.take()

    def choose(self, x: Tensor, latent: Tensor, rotation: Rotation, entries: Tensor, layout: PagedLayout) -> Tensor:
        """[T, K] numbers of entries; see op `compressed_topk`."""
        heads = self._queries(latent).unflatten(-1, (self._spec.num_heads, -1))
        query = self._rotate(heads, rotation.cos, rotation.sin)
        weights = self._score(x.float(), self._weights, None) * self._factor
        chosen: Tensor = self._find(query, weights, entries, layout, k=self._spec.topk, rate=self._spec.compressor.rate)
        return chosen


class WindowAttention:
    """x [T, I] -> [T, I]: attention to a window, and to entries."""

    def __init__(self, spec: WindowAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache of its window in a batch.
        scope: Scope of the attention itself.
        """
        self._spec, self.cache = spec, index
        self._rotate = TrailingRotary(scope, spec.rotary_dim)
        down = [Linear.of(scope, each) for each in spec.down()]
        self._compressors = [Compressor(each, scope, self._rotate) for each in spec.compressors]
        beside = [projection for each in self._compressors for projection in each.projections]
        self._down = MergedLinear(scope, *down, *beside)
        self._latent_norm = make_norm(spec.norm("q_a_norm", spec.q_lora_rank), scope)
        self._key_norm = make_norm(spec.norm("kv_norm", spec.head_dim), scope)
        self._query_norm = WeightlessRMSNorm(scope, spec.head_dim, spec.eps)
        self._queries = Linear.of(scope, spec.query)
        self._index = None if spec.index is None else EntryIndex(spec.index, spec, scope)
        self._sinks = scope.parameter("sinks", spec.num_heads, dtype=torch.float32)
        self.sinks: Tensor
        self._groups = _plain_linear(scope, spec)
        self.group_weights: Tensor
        """[G, R, H / G * D] of G groups of heads."""
        self._out = Linear.of(scope, spec.out)
        self._write = scope.op(ops.write_latent_cache)
        self._attend = scope.op(ops.compressed_attention)
        self._multiply = scope.op(ops.head_linear)
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.sinks = self._sinks.take()
        weight = self._groups.take_weight()
        self.group_weights = weight.view(self._spec.num_groups, self._spec.group_rank, -1).contiguous()

    def __call__(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        spec = self._spec
        rows, layout = batch.of_layer(self.cache)
        latent, key, *open_windows = self._down(x)
        latent = self._latent_norm(latent)
        key = self._rotate(self._key_norm(key)[:, None], rotation.cos, rotation.sin)[:, 0]
        self._write(torch.cat((key, *open_windows), dim=-1), rows, layout.slot_mapping)
        heads = self._query_norm(self._queries(latent).unflatten(-1, (spec.num_heads, -1)))
        query = self._rotate(heads, rotation.cos, rotation.sin)
        entries, entry_layout, chosen = self._entries(x, latent, rotation, batch)
        attended = self._attend(
            query,
            rows[..., : spec.head_dim],
            layout,
            self.sinks,
            entries,
            entry_layout,
            chosen,
            scale=spec.head_dim**-0.5,
            sliding_window=spec.sliding_window,
            rate=1 if spec.compressor is None else spec.compressor.rate,
        )
        attended = self._rotate.back(attended, rotation.cos, rotation.sin)
        grouped = attended.reshape(len(x), spec.num_groups, -1)
        return self._out(self._multiply(grouped, self.group_weights).flatten(1))

    def _entries(
        self, x: Tensor, latent: Tensor, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Tensor | None, PagedLayout | None, Tensor | None]:
        """Write what the step compresses -> entries, where they are, and which ones each token attends to."""
        spec = self._spec
        if spec.compressor is None or spec.entries is None:
            return None, None, None
        rows, layout = batch.of_layer(self.cache)
        cached, entry_layout = batch.of_layer(ENTRIES)
        columns = _columns(spec.entries, entry_layout.block_size)[spec.first_shape :]
        parts = [cached[..., own] for own, _ in zip(columns, self._compressors, strict=False)]
        begin = spec.head_dim
        for compressor, entries in zip(self._compressors, parts, strict=True):
            compressor.write(rows[..., begin:], layout, entries, entry_layout, rotation)
            begin += 2 * compressor.bias.shape[1]
        most = max(entry_layout.kv_lens) // spec.compressor.rate
        if self._index is None or spec.index is None or most <= spec.index.topk:
            return parts[0], entry_layout, None
        return parts[0], entry_layout, self._index.choose(x, latent, rotation, parts[1], entry_layout)


@cache
def _columns(entries: CompressedEntriesSpec, block_size: int) -> tuple[slice, ...]:
    return entries.columns(block_size)


def _plain_linear(scope: Scope, spec: WindowAttentionSpec) -> Linear:
    """A layer that is never applied to tokens: no adapter can stand on it, and no form but numbers is of use."""
    scope = dataclasses.replace(scope, adapters=None)
    groups, method = spec.groups, None if scope.quantization else scope.plain_method
    return Linear(scope / groups.name, groups.in_features, groups.out_features, method=method, is_replicated=True)


class ClampedMLP:
    """x [T, I] -> [T, I]: down(act(min(gate(x), c)) * clamp(up(x), -c, c))."""

    def __init__(self, spec: GatedMLPSpec, limit: float, scope: Scope) -> None:
        """Args:
        limit: c.
        scope: Scope of the network itself.
        """
        gate, up, self._down = (Linear.of(scope, each) for each in spec.projections())
        self._gate_and_up = MergedLinear(scope, gate, up)
        self._act, self._limit = gated_activation(scope, spec.act), limit

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_and_up(x)
        return self._down(self._act(gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)))


class HashChoice:
    """Logits [T, E] float32 -> the experts that a table has for the tokens, and how much each one counts."""

    def __init__(self, spec: HashMoESpec, scope: Scope) -> None:
        self._table = scope.parameter("tid2eid", spec.vocab_size, spec.routing.top_k, dtype=torch.int64)
        self.table: Tensor
        self.input_ids: Tensor
        """[T] int64, of the step: set before it is called."""
        self._rule = spec.routing
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.table = self._table.take()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        topk_ids = self.table[self.input_ids]
        weights = sqrt_softplus(logits).gather(1, topk_ids)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(self._rule.minimum)
        return topk_ids, weights * self._rule.scale


class DeepseekV4MoE:
    """(x [T, I], token ids [T]) -> [T, I]: what a token's experts make of it, and the shared network's part."""

    def __init__(self, spec: DeepseekV4MoESpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        inner, shared, stacked = scope / spec.name, spec.shared, spec.stacked
        assert isinstance(shared, GatedMLPSpec)
        assert stacked is not None
        self._hash: HashChoice | None = None
        if isinstance(spec, HashMoESpec):
            self._hash = HashChoice(spec, inner / spec.router)
            self.router = Router(inner / spec.router, spec.hidden_size, spec.num_experts, self._hash)
        else:
            self.router = make_router(spec, inner)
        self._experts = ClampedExperts(spec, inner / "experts")
        self._experts.accept_stacked(inner, stacked.names, inputs_first=stacked.inputs_first)
        self._shared = ClampedMLP(shared, spec.limit, scope / shared.name)

    def __call__(self, x: Tensor, input_ids: Tensor) -> Tensor:
        if self._hash is not None:
            self._hash.input_ids = input_ids
        return self._experts(x, *self.router(x)) + self._shared(x)


class HyperConnection:
    """What stands around a part of a layer: it reads a mixture of the streams [T, S, I], and what it gives is added to
    all of them, once they are mixed (Xie et al. 2026)."""

    def __init__(self, spec: MixedStreamsSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the connection.
        """
        self._spec, width = spec, spec.num_streams * spec.hidden_size
        wide = dataclasses.replace(scope, dtype=torch.float32)
        self._norm, self._sigmoid = WeightlessRMSNorm(wide, width, spec.norm_eps), activation(wide, "sigmoid")
        self._linear = wide.op(ops.linear)
        rows = (2 + spec.num_streams) * spec.num_streams
        self._parameters = [
            scope.parameter(name, *size, dtype=torch.float32)
            for name, size in (("fn", (rows, width)), ("base", (rows,)), ("scale", (3,)))
        ]
        self._weights: list[Tensor]
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._weights = [parameter.take() for parameter in self._parameters]

    def __call__(self, streams: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Streams before a part [T, I] -> [T, I] of the layer -> those behind it."""
        num, spec, dtype = self._spec.num_streams, self._spec, streams.dtype
        fn, base, scale = self._weights
        found = self._linear(self._norm(streams.flatten(1).float()), fn, None)
        sizes = (num, num, num * num)
        read, write, mix = (
            each * factor + offset
            for each, factor, offset in zip(found.split(sizes, dim=-1), scale, base.split(sizes), strict=True)
        )
        out = part(mixture(streams, self._sigmoid(read.contiguous()) + spec.gate_eps))
        gates = (self._sigmoid(write.contiguous()) * spec.magnitude).to(dtype)
        return gates[..., None] * out[:, None] + self._mixing(mix.unflatten(-1, (num, num))).to(dtype).mT @ streams

    def _mixing(self, logits: Tensor) -> Tensor:
        """[T, S, S] -> positive, all rows and columns with about the sum of one (Sinkhorn & Knopp 1967)."""
        eps = self._spec.gate_eps
        mix = torch.softmax(logits, dim=-1) + eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self._spec.num_iterations - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        return mix


class DeepseekV4Layer:
    """Attention and experts, each between hyper-connections."""

    def __init__(self, spec: DeepseekV4LayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache of its window in a batch.
        scope: Scope of the layer.
        """
        assert spec.input_norm is not None
        assert isinstance(spec.feed_forward, DeepseekV4MoESpec)
        assert spec.feed_forward_norm is not None
        attention = spec.mixers[0]
        assert isinstance(attention, WindowAttentionSpec)
        assert isinstance(spec.streams, MixedStreamsSpec)
        self.rate = 0 if attention.compressor is None else attention.compressor.rate
        """Tokens of a window; 0 where there are none."""
        self.attention = WindowAttention(attention, index, scope / attention.name)
        self.experts = DeepseekV4MoE(spec.feed_forward, scope)
        self._around_attention = HyperConnection(spec.streams, scope / "attn_hc")
        self._around_experts = HyperConnection(spec.streams, scope / "ffn_hc")
        self._attention_norm = make_norm(spec.input_norm, scope)
        self._experts_norm = make_norm(spec.feed_forward_norm, scope)

    def __call__(self, streams: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Streams [T, S, I] -> [T, S, I]."""
        streams = self._around_attention(streams, lambda x: self.attention(self._attention_norm(x), rotation, batch))
        return self._around_experts(streams, lambda x: self.experts(self._experts_norm(x), batch.input_ids))


class DeepseekV4ForCausalLM(HyperDecoderLM):
    """The DeepSeek-V4 network."""

    layers: list[DeepseekV4Layer]  # type: ignore[assignment]  # its specs are built as these

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        """Hidden states [T, I] behind the last norm."""
        self.use_adapters(batch.lora)
        length = max(batch.num_positions, *batch.attention[0].kv_lens)
        streams = self.streams(batch)
        rotations: dict[tuple[int, int], Rotation] = {}
        for i, (layer, number) in enumerate(zip(self.layers, self._rotations, strict=True)):
            self._tap_mean(taps, i, streams)
            assert number is not None
            rotation = rotations.get((number, layer.rate))
            if rotation is None:
                rotation = rotations[number, layer.rate] = self._rotation(batch, number, layer.rate, length)
            streams = layer(streams, rotation, batch)
        return self.hidden(streams, taps)

    def _rotation(self, batch: ForwardBatch, number: int, rate: int, length: int) -> Rotation:
        table = self._tables[number]
        cos, sin = table(batch.positions, length)
        if not rate:
            return Rotation(cos, sin, cos[:0], sin[:0])
        _, layout = batch.of_layer(ENTRIES)
        return Rotation(cos, sin, *table(window_ends(layout, rate).windows * rate, length))
