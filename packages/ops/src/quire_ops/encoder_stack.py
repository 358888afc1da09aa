"""Op `encoder_stack`: all layers of an encoder as data, and what a backend makes of them.

Knows the parts of a layer and where its norms are, and its reference, which is made of the other ops' references; does
not know networks, checkpoints or how weights are quantized.

Shape legend: E tokens of all texts, which stand one behind the other; H heads, Hkv of keys
and values, D head dimension, R rotated dimensions, M furthest distance that a bias tells apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire_ops.activations import activation
from quire_ops.encoder_attention import encoder_attention
from quire_ops.kv_cache_ops import rotary_embedding
from quire_ops.layer_weights import MLPWeights, NormWeights
from quire_ops.linear_weights import GatedWeights, LinearWeights, reference_linear
from quire_ops.norms import layer_norm, rms_norm
from quire_ops.op import op

__all__ = [
    "INPUT_GROUP",
    "EncoderAttentionWeights",
    "EncoderLayerWeights",
    "EncoderStack",
    "RunEncoder",
    "encoder_stack",
]

INPUT_GROUP = 64
"""Numbers of a token that are rounded with one scale, where inputs are rounded (`EncoderStack.rounds_inputs`); the last
ones may be fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderAttentionWeights:
    """Attention of every token to all tokens of its own text."""

    q: LinearWeights
    """[H * D, hidden_size]."""
    k: LinearWeights
    """[Hkv * D, hidden_size], as v."""
    v: LinearWeights
    o: LinearWeights
    """[hidden_size, H * D]."""
    num_heads: int
    scale: float
    """Factor of the scores."""
    bias: Tensor | None = None
    """[H, 2 * M + 1] biases of scores by distance, as op `encoder_attention` takes them; None for none."""
    sliding_window: int | None = None
    """Tokens see those at most so far away, in each direction; None for all."""
    rotation: int | None = None
    """Which of the pass's rotations queries and keys get; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerWeights:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); or norms behind the sums (Xiong et al. 2020, pre-LN and
    post-LN)."""

    attention: EncoderAttentionWeights
    attention_norm: NormWeights | None
    """None for none."""
    feed_forward: GatedWeights | MLPWeights
    """With any function of op `activation`, "relu" or "relu2"."""
    feed_forward_norm: NormWeights
    is_post_ln: bool
    """Both norms stand behind the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStack:
    """All layers and the norm behind them. Sizes follow from the weights."""

    layers: tuple[EncoderLayerWeights, ...]
    final_norm: NormWeights | None
    hidden_size: int
    dtype: torch.dtype
    """Of what goes in and comes out; a backend may keep more digits in between."""
    rotary_dim: int
    """R: the first dimensions of a head, which are rotated; 0 where no layer has a rotation."""
    rounds_inputs: bool = False
    """What matrices take is rounded to 8 bits, `INPUT_GROUP` numbers of a token at a time. All of them are then int8 as
    op `grouped_linear` takes it, in such groups, without zero points."""


_Linear = Callable[[Tensor, LinearWeights], Tensor]


class RunEncoder(Protocol):
    """A stack ready to run. Not thread-safe."""

    def __call__(self, x: Tensor, lens: Sequence[int], rotations: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run all layers over some texts.

        Args:
            x: [E, hidden_size] embeddings.
            lens: Tokens of each text.
            rotations: Cosines and signed sines [E, 1, R], as `rotary_embedding` takes them.

        Returns:
            [E, hidden_size] behind the final norm.
        """


@op
def encoder_stack(stack: EncoderStack) -> RunEncoder:
    """All layers of an encoder in one call: what other ops do in turn. Optional: where no backend has it, networks call
    the other ops layer by layer."""

    linear = _rounded_linear if stack.rounds_inputs else reference_linear

    def run(x: Tensor, lens: Sequence[int], rotations: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        for layer in stack.layers:
            norm, feed_forward_norm = layer.attention_norm, layer.feed_forward_norm
            if layer.is_post_ln:
                x = _normed(x + _attention(x, layer.attention, lens, rotations, linear), norm)
                x = _normed(x + _feed_forward(x, layer.feed_forward, linear), feed_forward_norm)
            else:
                x = x + _attention(_normed(x, norm), layer.attention, lens, rotations, linear)
                x = x + _feed_forward(_normed(x, feed_forward_norm), layer.feed_forward, linear)
        return _normed(x, stack.final_norm)

    return run


def _rounded_linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """A linear layer whose inputs are rounded."""
    return reference_linear(_rounded(x.double()), weights).to(x.dtype)


def _rounded(x: Tensor) -> Tensor:
    """x [E, I], each `INPUT_GROUP` numbers of a row as low + step * n: n a whole number from 0 to 255, low the least of
    them, and low + step * 255 the largest. NaN where not all are finite."""
    groups = []
    for group in x.split(INPUT_GROUP, dim=1):
        low, high = group.aminmax(dim=1, keepdim=True)
        step = (high - low) / 255
        numbers = ((group - low) / torch.where(step == 0, 1.0, step)).round_()
        groups.append(low + step * numbers)
    return torch.cat(groups, dim=1)


def _attention(
    x: Tensor,
    weights: EncoderAttentionWeights,
    lens: Sequence[int],
    rotations: Sequence[tuple[Tensor, Tensor]],
    linear: _Linear,
) -> Tensor:
    head_dim = weights.q.weight.shape[0] // weights.num_heads
    query, key, value = (linear(x, matrix).view(len(x), -1, head_dim) for matrix in (weights.q, weights.k, weights.v))
    if weights.rotation is not None:
        cos, sin = rotations[weights.rotation]
        size = cos.shape[-1]
        query, key = (
            torch.cat((rotary_embedding(each[..., :size], cos, sin), each[..., size:]), dim=-1) for each in (query, key)
        )
    attended = encoder_attention(
        query, key, value, list(lens), scale=weights.scale, window=weights.sliding_window, bias=weights.bias
    )
    return linear(attended.flatten(1), weights.o)


def _feed_forward(x: Tensor, weights: GatedWeights | MLPWeights, linear: _Linear) -> Tensor:
    if isinstance(weights, MLPWeights):
        return linear(_activated(linear(x, weights.up), weights.activation), weights.down)
    gate = _activated(linear(x, weights.gate), weights.activation)
    return linear(gate * linear(x, weights.up), weights.down)


def _activated(x: Tensor, name: str) -> Tensor:
    if name in ("relu", "relu2"):
        positive = torch.relu(x)
        return positive if name == "relu" else positive.square()
    return activation(x, name)


def _normed(x: Tensor, norm: NormWeights | None) -> Tensor:
    """x [E, size] behind a norm, or as it is."""
    if norm is None:
        return x
    if norm.kind == "layer":
        return layer_norm(x, norm.weight, norm.bias, norm.eps)
    assert norm.weight is not None
    return rms_norm(x, norm.weight, norm.eps)
