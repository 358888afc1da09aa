"""Op `decoder_stack`: a stack of pre-norm decoder layers as data, and what a backend makes of it.

Knows the shape of such a stack and its reference, which is made of the other ops' references; does not know networks,
checkpoints or how weights are quantized.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension, R rotated
dimensions of a head, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire_ops.activations import GATED_ACTIVATIONS, sigmoid_and_mul
from quire_ops.attention_ops import paged_attention
from quire_ops.fused_moe import Experts, fused_moe
from quire_ops.kv_cache_ops import rotary_embedding, write_kv_cache
from quire_ops.layout import PagedLayout
from quire_ops.linear_ops import linear, lm_head
from quire_ops.linear_weights import GatedWeights, LinearWeights, reference_linear
from quire_ops.lora import LoraTokens
from quire_ops.norms import rms_norm
from quire_ops.op import op
from quire_ops.routing import RoutingRule, route_experts

__all__ = ["DecoderLayerWeights", "DecoderStack", "RoutedExperts", "RunDecoder", "decoder_stack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Experts, and how each token chooses among them."""

    router: Tensor
    """[E, hidden_size], contiguous, in the network's dtype; logits stay as wide as they are summed."""
    router_bias: Tensor | None = None
    """[E] float32, added to the logits."""
    choice_bias: Tensor | None = None
    """[E] float32, as op `route_experts` takes it."""
    rule: RoutingRule
    experts: Experts
    shared: GatedWeights | None = None
    """What every token uses beside its experts; of one width in all layers."""
    shared_gate: Tensor | None = None
    """[1, hidden_size], contiguous, in the network's dtype: that counts as much as the sigmoid of its product says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeights:
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)). Norms are RMS norms, in any dtype; those that
    are None are left out."""

    input_norm: Tensor | None
    """[hidden_size], as the others but those of heads."""
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    q_norm: Tensor | None = None
    """[D]: each query head is normalised; or [Hq * D]: all at once (OLMo 2); k_norm likewise for keys. Both are there,
    or none."""
    k_norm: Tensor | None = None
    norm_after_rotation: bool = False
    """Heads are normalised after they are rotated, not before."""
    attention_out_norm: Tensor | None = None
    """Of what attention gives, before it is added."""
    feed_forward_norm: Tensor | None
    feed_forward: GatedWeights | RoutedExperts
    feed_forward_out_norm: Tensor | None = None
    """Of what the feed-forward part gives, before it is added."""
    residual_factor: float = 1.0
    """Of what both parts give, before it is added."""
    scale: float
    """Factor of the attention scores."""
    soft_cap: float | None = None
    """As op `paged_attention` takes it, as the next two."""
    sliding_window: int | None = None
    sinks: Tensor | None = None
    """[Hq]."""
    rotation: int | None = 0
    """Which of the step's rotations queries and keys get; None for none."""
    interleaved: bool = False
    """Neighbours are the pairs that are rotated (2i, 2i + 1), not (i, i + R / 2); what comes back is in the order of
    the latter."""
    kv_scale: Tensor | None = None
    """[2, Hkv] float32, of a cache in fp8, as op `write_kv_cache` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStack:
    """All layers and the norm behind them. Sizes follow from the weights and `head_dim`; all gated networks that are no
    experts have one width, and so have all that stand beside experts."""

    layers: tuple[DecoderLayerWeights, ...]
    final_norm: Tensor
    """[hidden_size]."""
    dtype: torch.dtype
    """Of the residual stream."""
    head_dim: int
    rotary_dim: int
    """R: the first dimensions of a head, which are rotated."""
    eps: float
    """Of every norm."""
    activation: str
    """"silu" or "gelu" (tanh approximation); experts have their own."""


class RunDecoder(Protocol):
    """A stack ready to run. Not thread-safe."""

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one step and write its keys and values into the caches.

        Args:
            x: [T, hidden_size] embeddings.
            rotations: Cosines and signed sines [T, 1, R], as `rotary_embedding` takes them; at least one, if empty.
            layouts: Per KV cache group.
            group_of_layer: Per layer, index into `layouts`.
            kv_caches: Per layer, in a format that the backend serves. The same tuple each time, as long as they are the
                same caches.
            lora: Tokens with adapters, if there are any.
            taps: Layer -> [T, hidden_size], contiguous: gets the layer's input before its norm; the number of layers
                stands for what comes out of the last one.

        Returns:
            [T, hidden_size] after the final norm.
        """


@op
def decoder_stack(stack: DecoderStack) -> RunDecoder:
    """A whole stack of pre-norm decoder layers in one call: what other ops do in turn. Optional: where no backend has
    it, networks call the other ops layer by layer."""
    act_and_mul = GATED_ACTIVATIONS[stack.activation]

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        width = weight.shape[0]  # of all heads at once, or of one
        return rms_norm(x.reshape(x.shape[0], -1, width), weight, stack.eps).view(x.shape)

    def run(
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        def product(x: Tensor, weights: LinearWeights) -> Tensor:
            return reference_linear(x, weights, lora=lora)

        def heads(x: Tensor, layer: DecoderLayerWeights, weights: LinearWeights, norm: Tensor | None) -> Tensor:
            out = product(x, weights).view(x.shape[0], -1, stack.head_dim)
            if layer.rotation is None:
                return normed(out, norm)
            cos, sin = rotations[layer.rotation]
            if layer.norm_after_rotation:
                return normed(_rotated(out, cos, sin, layer.interleaved), norm)
            return _rotated(normed(out, norm), cos, sin, layer.interleaved)

        def gated(x: Tensor, weights: GatedWeights) -> Tensor:
            return product(act_and_mul(product(x, weights.gate), product(x, weights.up)), weights.down)

        def feed_forward(x: Tensor, weights: GatedWeights | RoutedExperts) -> Tensor:
            if isinstance(weights, GatedWeights):
                return gated(x, weights)
            out = _reference_experts(x, weights)
            if weights.shared is None:
                return out
            shared = gated(x, weights.shared)
            if weights.shared_gate is not None:
                shared = sigmoid_and_mul(linear(x, weights.shared_gate, None), shared)
            return out + shared

        taps = taps or {}
        for i, (layer, group, kv_cache) in enumerate(zip(stack.layers, group_of_layer, kv_caches, strict=True)):
            if i in taps:
                taps[i].copy_(x)
            inner = normed(x, layer.input_norm)
            query, key = heads(inner, layer, layer.q, layer.q_norm), heads(inner, layer, layer.k, layer.k_norm)
            value, layout = product(inner, layer.v).view(x.shape[0], -1, stack.head_dim), layouts[group]
            write_kv_cache(key, value, kv_cache, layout.slot_mapping, layer.kv_scale)
            attended = paged_attention(
                query,
                kv_cache,
                layout,
                scale=layer.scale,
                soft_cap=layer.soft_cap,
                sliding_window=layer.sliding_window,
                sinks=layer.sinks,
                kv_scale=layer.kv_scale,
            )
            attended = normed(product(attended.flatten(1), layer.o), layer.attention_out_norm)
            x = x + attended * layer.residual_factor
            inner = feed_forward(normed(x, layer.feed_forward_norm), layer.feed_forward)
            x = x + normed(inner, layer.feed_forward_out_norm) * layer.residual_factor
        if len(stack.layers) in taps:
            taps[len(stack.layers)].copy_(x)
        return rms_norm(x, stack.final_norm, stack.eps)

    return run


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D], of which the first dimensions are rotated."""
    part, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    if interleaved:
        part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
    return torch.cat((rotary_embedding(part, cos, sin), rest), dim=-1)


def _reference_experts(x: Tensor, weights: RoutedExperts) -> Tensor:
    logits = lm_head(x, weights.router)
    if weights.router_bias is not None:
        logits = logits + weights.router_bias
    return fused_moe(weights.experts)(x, *route_experts(logits, weights.choice_bias, weights.rule))
