"""Modules of Hunyuan V4.

Shape legend: T tokens of the step, H hidden size, S channels of the residual stream, K tokens that are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce
from operator import add

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, build_mixer
from quire_models.config import ModelConfig
from quire_models.families.deepseek_v32_layers import LightningIndexer, SparseLatentAttention
from quire_models.families.hy_v4 import GatedSinkLatentSpec, HyperLayerSpec, HyperNetworkSpec, StreamsSpec
from quire_models.families.step3p5_layers import LimitedExperts, LimitedMoE
from quire_models.layers.activations import activation
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.norm import WeightlessRMSNorm, make_norm
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["ClampedMoE", "GatedSinkLatentAttention", "HyperDecoderLM", "HyperLayer", "StreamGates", "mixture"]


class TailIndexer(LightningIndexer):
    """An indexer that rotates the last dimensions of its heads, not the first."""

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rotate(heads.roll(self._rotary_dim, -1), cos, sin)


class GatedSinkLatentAttention(SparseLatentAttention):
    """x [T, H] -> [T, H]; heads have sinks, and what they give has gates."""

    make_indexer = TailIndexer
    is_gated = True

    def __init__(self, spec: GatedSinkLatentSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope, beside=(Linear.of(scope, spec.gate()),))
        self._attend_with_lse = scope.op(ops.latent_attention_with_lse)
        self._attend_to_with_lse = scope.op(ops.sparse_latent_attention_with_lse)
        self._merge = scope.op(ops.merge_attention_states)
        self._sink_parameter = scope.parameter("sinks", spec.num_heads, dtype=torch.float32)
        self._sinks: Tensor
        scope.when_loaded(self._finish_sinks)

    def _finish_sinks(self) -> None:
        self._sinks = self._sink_parameter.take()

    def fused_weights(self) -> None:
        """None: op `decoder_stack` knows neither sinks nor gates here."""

    def _gated_queries(
        self, latent: Tensor, down: Tensor, beside: list[Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._queries(latent, cos, sin), beside[0]

    def _attended(self, query: Tensor, latents: Tensor, slots: Tensor | None, batch: ForwardBatch) -> Tensor:
        scale, rank = self._spec.scale, self._rank
        if slots is None:
            layout, visible = batch.of_layer(self.cache)[1], (batch.positions + 1).to(torch.int32)
            out, lse = self._attend_with_lse(query, latents, layout, visible, scale=scale, rank=rank)
        else:
            out, lse = self._attend_to_with_lse(query, latents, slots, scale=scale, rank=rank)
        merged: Tensor = self._merge(out[None], lse[None], self._sinks)
        return merged.to(query.dtype)


class ClampedExperts(LimitedExperts):
    """act(min(gate, c)) * clamp(up, -c, c)."""

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        activated: Tensor = self._gate_op(gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit))
        return activated


class ClampedMoE(LimitedMoE):
    """x [T, H] -> [T, H]: experts with limits, and a shared network."""

    make_experts = ClampedExperts


class StreamGates:
    """Channels [T, S, H] -> gates [T, S] float32 of each kind, of the norm of all channels together."""

    def __init__(self, spec: StreamsSpec, scope: Scope, magnitudes: tuple[float, ...], *, prefix: str = "") -> None:
        """Args:
        magnitudes: Factor of each kind of gates.
        prefix: Of the parameters' names.
        """
        kinds, self._streams = len(magnitudes), spec.num_streams
        rows, width = kinds * spec.num_streams, spec.num_streams * spec.hidden_size
        wide = dataclasses.replace(scope, dtype=torch.float32)
        self._norm, self._eps = WeightlessRMSNorm(wide, width, spec.norm_eps), spec.gate_eps
        self._score, self._sigmoid = wide.op(ops.linear), activation(wide, "sigmoid")
        self._magnitudes = torch.tensor(magnitudes, device=scope.device).repeat_interleave(spec.num_streams)
        self._parameters = [
            scope.parameter(f"{prefix}{name}", *shape, dtype=torch.float32)
            for name, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (kinds,)))
        ]
        self._matrix: Tensor
        self._base: Tensor
        self._scale: Tensor
        """[rows]."""
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self._matrix, self._base, scale = (parameter.take() for parameter in self._parameters)
        self._scale = scale.repeat_interleave(self._streams)

    def __call__(self, streams: Tensor) -> tuple[Tensor, ...]:
        mixed = self._score(self._norm(streams.flatten(1).float()), self._matrix, None)
        gates: Tensor = self._sigmoid(mixed * self._scale + self._base) * self._magnitudes + self._eps
        kinds: tuple[Tensor, ...] = gates.split(self._streams, dim=-1)
        return kinds


def mixture(streams: Tensor, gates: Tensor) -> Tensor:
    """The sum [T, H] of channels [T, S, H], each by its gate [T, S]; in their order, whatever else is in the step."""
    parts = (gates[:, stream, None] * streams[:, stream] for stream in range(streams.shape[1]))
    return reduce(add, parts).to(streams.dtype)


class HyperLayer:
    """Channels [T, S, H] -> [T, S, H], which have no residual beside them."""

    def __init__(self, spec: HyperLayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its mixer's cache in a batch.
        scope: Scope of the layer.
        """
        assert spec.input_norm is not None
        assert spec.feed_forward_norm is not None
        assert spec.feed_forward is not None
        self.mixer = build_mixer(spec.mixers[0], index, scope)
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self.input_norm = make_norm(spec.input_norm, scope)
        self.feed_forward_norm = make_norm(spec.feed_forward_norm, scope)
        magnitudes = (1.0, spec.streams.magnitude)
        self.mixer_gates = StreamGates(spec.streams, scope / "attn_hc", magnitudes)
        self.feed_forward_gates = StreamGates(spec.streams, scope / "ffn_hc", magnitudes)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        x = self._part(x, self.mixer_gates, lambda own: self.mixer(self.input_norm(own), cos, sin, batch))
        return self._part(x, self.feed_forward_gates, lambda own: self.feed_forward(self.feed_forward_norm(own))), None

    @staticmethod
    def _part(streams: Tensor, gates: StreamGates, part: Callable[[Tensor], Tensor]) -> Tensor:
        read, write = gates(streams)
        out = part(mixture(streams, read)).float()
        return (write[..., None] * out[:, None] + streams.float()).to(streams.dtype)


class HyperDecoderLM(DecoderLM):
    """The network. Drafters that read the residual stream before a layer get the mean of its channels."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, HyperNetworkSpec)
        self._num_streams = spec.streams.num_streams
        self._collapse = self.make_collapse(spec, scope)

    def make_collapse(self, spec: HyperNetworkSpec, scope: Scope) -> Callable[[Tensor], Tensor]:
        """Channels [T, S, H] behind the last layer -> what the last norm reads, [T, H]."""
        gates = StreamGates(spec.streams, scope / f"{spec.body}.hc_head", (1.0,), prefix="hc_")
        return lambda streams: mixture(streams, *gates(streams))

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        self.use_adapters(batch.lora)
        length = max(batch.num_positions, *batch.attention[0].kv_lens)
        rotations = [table(batch.positions, length) for table in self._tables]
        x = self.streams(batch)
        for i, (layer, rotation) in enumerate(zip(self.layers, self._rotations, strict=True)):
            self._tap_mean(taps, i, x)
            cos, sin = (self._unrotated, self._unrotated) if rotation is None else rotations[rotation]
            x, _ = layer(x, None, cos, sin, batch)
        return self.hidden(x, taps)

    def streams(self, batch: ForwardBatch) -> Tensor:
        """[T, S, H]: the embedding, S times."""
        embedded = self.embed(batch.input_ids, batch.positions, batch.lora, batch.media)
        return embedded[:, None].expand(-1, self._num_streams, -1)

    def hidden(self, x: Tensor, taps: dict[int, Tensor]) -> Tensor:
        """[T, H]: what comes out of the last norm, of the streams behind the last layer."""
        self._tap_mean(taps, len(self.layers), x)
        hidden: Tensor = self.norm(self._collapse(x))
        return hidden

    def _tap_mean(self, taps: dict[int, Tensor], layer: int, x: Tensor) -> None:
        if layer in taps:
            taps[layer].copy_(x.float().mean(dim=1))
