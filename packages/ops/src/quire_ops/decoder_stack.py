"""Op `decoder_stack`: all layers of a decoder as data, and what a backend makes of them.

Knows the order of layers and the norm behind them, and its reference, which is made of the other ops' references; does
not know networks, checkpoints or how weights are quantized. What is in a layer is in `layer_weights.py`.

Shape legend: T tokens of the step, R rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire_ops.layer_weights import DecoderLayerWeights, NormWeights
from quire_ops.layout import PagedLayout
from quire_ops.lora import LoraTokens
from quire_ops.norms import layer_norm, rms_norm
from quire_ops.op import op
from quire_ops.reference_layers import LayerStep, reference_feed_forward, reference_mixer

__all__ = ["DecoderStack", "RankGroup", "RunDecoder", "decoder_stack"]


class RankGroup(Protocol):
    """Tensor-parallel ranks whose kernels meet inside one call."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def handle(self) -> int:
        """What the backend's library knows the group by, in this process."""

    def check(self) -> None:
        """Raise what a call met.

        Raises:
            RankDeadError: A rank is gone, and the call's results are of no use.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStack:
    """All layers and the norm behind them. Sizes follow from the weights; matrices that take the same input are kept in
    one form."""

    layers: tuple[DecoderLayerWeights, ...]
    final_norm: NormWeights | None
    hidden_size: int
    dtype: torch.dtype
    """Of the residual stream."""
    rotary_dim: int
    """R: the first dimensions of a head, which are rotated; those behind the plain ones in latent attention."""
    rounds_steps: bool = False
    """Every op within a layer rounds its result to `dtype`, as if it was called alone; else a backend may keep gate and
    up, and the products of a rotation, as wide as they are summed."""
    group: RankGroup | None = None
    """The ranks that share the layers, of which these are one rank's parts; every rank runs the same steps. Results
    have the bits of one rank. None for whole layers, which are all that the reference computes."""


class RunDecoder(Protocol):
    """A stack ready to run. Not thread-safe."""

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        states: tuple[tuple[Tensor, ...], ...] = (),
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one step and write its keys and values, or states, into the caches.

        Args:
            x: [T, hidden_size] embeddings.
            rotations: Cosines and signed sines [T, 1, R], as `rotary_embedding` takes them.
            layouts: Per KV cache group.
            group_of_layer: Per cache, index into `layouts`.
            kv_caches: Keys and values, or latents, in a format that the backend serves; of mixers that keep states
                anything. The same tuple each time, as long as they are the same caches.
            states: Per cache, state tensors in the order in which the mixer names them [num_blocks, *shape], float32;
                none for attention. Empty when no layer keeps any.
            lora: Tokens with adapters, if there are any.
            taps: Layer -> [T, hidden_size], contiguous: gets the layer's input before its norm; the number of layers
                stands for what comes out of the last one.

        Returns:
            [T, hidden_size] after the final norm.

        Raises:
            RankDeadError: A rank that shares the layers is gone.
        """


@op
def decoder_stack(stack: DecoderStack) -> RunDecoder:
    """All layers of a decoder in one call: what other ops do in turn. Optional: where no backend has it, networks call
    the other ops layer by layer."""

    if stack.group is not None:
        raise ValueError("the reference of decoder_stack computes whole layers, and ranks share these")

    def run(
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        layouts: Sequence[PagedLayout],
        group_of_layer: tuple[int, ...],
        kv_caches: tuple[Tensor, ...],
        states: tuple[tuple[Tensor, ...], ...] = (),
        lora: LoraTokens | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        taps = taps or {}
        for i, layer in enumerate(stack.layers):
            if i in taps:
                taps[i].copy_(x)
            entry = x
            if layer.mixer is not None:
                step = LayerStep(
                    rotations=rotations,
                    layout=layouts[group_of_layer[layer.cache]],
                    kv_cache=kv_caches[layer.cache],
                    states=states[layer.cache] if states else (),
                    lora=lora,
                )
                mixed = reference_mixer(_normed(x, layer.input_norm), layer.mixer, step)
                x = x + _normed(mixed, layer.attention_out_norm) * layer.residual_factor
            if layer.feed_forward is not None:
                inner = _normed(entry if layer.parallel else x, layer.feed_forward_norm)
                inner = reference_feed_forward(inner, layer.feed_forward, lora)
                x = x + _normed(inner, layer.feed_forward_out_norm) * layer.residual_factor
        if len(stack.layers) in taps:
            taps[len(stack.layers)].copy_(x)
        return _normed(x, stack.final_norm)

    return run


def _normed(x: Tensor, norm: NormWeights | None) -> Tensor:
    """x [T, size] behind a norm, or as it is."""
    if norm is None:
        return x
    if norm.kind == "layer":
        return layer_norm(x, norm.weight, norm.bias, norm.eps)
    assert norm.weight is not None
    return rms_norm(x, norm.weight, norm.eps)
