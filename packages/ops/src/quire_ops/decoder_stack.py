"""Op `decoder_stack`: a stack of pre-norm decoder layers as data, and what a backend makes of it.

Knows the shape of such a stack and its reference, which is made of the other ops' references; does not know networks,
checkpoints or how weights are quantized.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire_ops import reference
from quire_ops.declarations import PagedLayout
from quire_ops.fused_moe import Experts, reference_fused_moe
from quire_ops.linear_weights import GatedWeights, LinearWeights, reference_linear
from quire_ops.lora import LoraTokens
from quire_ops.routing import RoutingRule, reference_route_experts

__all__ = ["DecoderLayerWeights", "DecoderStack", "RoutedExperts", "RunDecoder", "reference_decoder_stack"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeights:
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    input_norm: Tensor
    """[hidden_size], as the other norm."""
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    q_norm: Tensor | None = None
    """[D]: each query head is normalised before it is rotated; k_norm likewise for keys."""
    k_norm: Tensor | None = None
    post_attention_norm: Tensor
    feed_forward: GatedWeights | RoutedExperts
    sliding_window: int | None = None
    sinks: Tensor | None = None
    """[Hq], as op `paged_attention` takes it."""
    kv_scale: Tensor | None = None
    """[2, Hkv] float32, of a cache in fp8, as op `write_kv_cache` takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStack:
    """All layers and the norm behind them. Sizes follow from the weights and `head_dim`."""

    layers: tuple[DecoderLayerWeights, ...]
    final_norm: Tensor
    """[hidden_size]."""
    head_dim: int
    eps: float
    """Of every norm."""
    scale: float
    """Factor of the attention scores."""
    activation: str
    """"silu" or "gelu" (tanh approximation); experts have their own."""


class RunDecoder(Protocol):
    """A stack ready to run. Not thread-safe."""

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one step and write its keys and values into the caches.

        Args:
            x: [T, hidden_size] embeddings.
            cos: [T, 1, D], as `rotary_embedding` takes it; `sin` likewise.
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


def reference_decoder_stack(stack: DecoderStack) -> RunDecoder:
    """The stack by the references of the other ops."""
    act_and_mul: Callable[[Tensor, Tensor], Tensor] = getattr(reference, f"{stack.activation}_and_mul")

    def heads(x: Tensor, weights: LinearWeights, norm: Tensor | None, lora: LoraTokens | None) -> Tensor:
        out = reference_linear(x, weights, lora=lora).view(x.shape[0], -1, stack.head_dim)
        return out if norm is None else reference.rms_norm(out, norm, stack.eps)

    def run(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        def linear(x: Tensor, weights: LinearWeights) -> Tensor:
            return reference_linear(x, weights, lora=lora)

        def feed_forward(x: Tensor, weights: GatedWeights | RoutedExperts) -> Tensor:
            if isinstance(weights, RoutedExperts):
                return _reference_experts(x, weights)
            return linear(act_and_mul(linear(x, weights.gate), linear(x, weights.up)), weights.down)

        taps = taps or {}
        for i, (layer, group, kv_cache) in enumerate(zip(stack.layers, group_of_layer, kv_caches, strict=True)):
            if i in taps:
                taps[i].copy_(x)
            normed = reference.rms_norm(x, layer.input_norm, stack.eps)
            query = reference.rotary_embedding(heads(normed, layer.q, layer.q_norm, lora), cos, sin)
            key = reference.rotary_embedding(heads(normed, layer.k, layer.k_norm, lora), cos, sin)
            value, layout = heads(normed, layer.v, None, lora), layouts[group]
            reference.write_kv_cache(key, value, kv_cache, layout.slot_mapping, layer.kv_scale)
            attended = reference.paged_attention(
                query,
                kv_cache,
                layout,
                scale=stack.scale,
                sliding_window=layer.sliding_window,
                sinks=layer.sinks,
                kv_scale=layer.kv_scale,
            )
            x = x + linear(attended.flatten(1), layer.o)
            x = x + feed_forward(reference.rms_norm(x, layer.post_attention_norm, stack.eps), layer.feed_forward)
        if len(stack.layers) in taps:
            taps[len(stack.layers)].copy_(x)
        return reference.rms_norm(x, stack.final_norm, stack.eps)

    return run


def _reference_experts(x: Tensor, weights: RoutedExperts) -> Tensor:
    logits = reference.lm_head(x, weights.router)
    if weights.router_bias is not None:
        logits = logits + weights.router_bias
    return reference_fused_moe(weights.experts)(x, *reference_route_experts(logits, weights.choice_bias, weights.rule))
