"""Op `decoder_stack`: a stack of pre-norm decoder layers as data, and what a backend makes of it.

Knows the shape of such a stack and its reference, which is made of the other ops' references; does not know networks,
checkpoints or how weights are quantized.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from quire_ops import reference
from quire_ops.declarations import PagedLayout
from quire_ops.lora import LoraTokens, LoraWeights, lora_linear

__all__ = ["DecoderLayerWeights", "DecoderStack", "LinearWeights", "RunDecoder", "reference_decoder_stack"]


class LinearWeights(NamedTuple):
    """A linear layer."""

    weight: Tensor
    """[outputs, inputs], contiguous, in the network's dtype; or as op `int8_linear`, `w8a8_linear` or
    `grouped_linear` takes it. All matrices of a stack alike."""
    bias: Tensor | None = None
    """[outputs], in the network's dtype."""
    scale: Tensor | None = None
    """As those ops take it."""
    zero: Tensor | None = None
    input_scale: Tensor | None = None
    """As op `w8a8_linear` takes it, of weights that are meant for that op. In a stack, or of experts: 0."""
    lora: LoraWeights | None = None
    """Adapters on top of it; None where the layer never has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeights:
    """One layer: x + attention(norm(x)), then x + down(act(gate(norm(x))) * up(norm(x)))."""

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
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    sliding_window: int | None = None
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
    """"silu" or "gelu" (tanh approximation)."""


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


def reference_linear(
    x: Tensor, weights: LinearWeights, *, wide: bool = False, lora: LoraTokens | None = None
) -> Tensor:
    """Any form of a linear layer. wide: the result in float32, of a layer without a bias."""
    out = _reference_base(x, weights, wide=wide)
    if lora is not None and weights.lora is not None:
        lora_linear(out, x, weights.lora, lora)
    return out


def _reference_base(x: Tensor, weights: LinearWeights, *, wide: bool) -> Tensor:
    if weights.scale is None:
        return reference.lm_head(x, weights.weight) if wide else reference.linear(x, weights.weight, weights.bias)
    if weights.input_scale is not None:
        scale, input_scale = weights.scale, weights.input_scale
        return reference.w8a8_linear(x, weights.weight, scale, input_scale, weights.bias, wide=wide)
    if weights.scale.ndim == 1:
        return reference.int8_linear(x, weights.weight, weights.scale, weights.bias, wide=wide)
    return reference.grouped_linear(x, weights.weight, weights.scale, weights.zero, weights.bias, wide=wide)


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
                kv_scale=layer.kv_scale,
            )
            x = x + linear(attended.flatten(1), layer.o)
            normed = reference.rms_norm(x, layer.post_attention_norm, stack.eps)
            inner = act_and_mul(linear(normed, layer.gate), linear(normed, layer.up))
            x = x + linear(inner, layer.down)
        if len(stack.layers) in taps:
            taps[len(stack.layers)].copy_(x)
        return reference.rms_norm(x, stack.final_norm, stack.eps)

    return run
