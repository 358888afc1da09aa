"""The ways in which attention and feed-forward network stand in a decoder layer, for `DecoderLM`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire_attention import ForwardBatch

__all__ = ["BlockAttention", "NormedSumBlock", "ParallelBlock", "PostNormBlock", "PreNormBlock", "SandwichBlock"]

Map = Callable[[Tensor], Tensor]
"""[T, hidden_size] -> [T, hidden_size]."""


class BlockAttention(Protocol):
    """The attention of a layer."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""


@dataclass(slots=True, kw_only=True)
class PreNormBlock:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    input_norm: Map
    attention: BlockAttention
    mlp_norm: Map
    mlp: Map

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, batch)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(slots=True, kw_only=True)
class PostNormBlock:
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    attention: BlockAttention
    attention_norm: Map
    mlp: Map
    output_norm: Map

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(x, cos, sin, batch))
        return x + self.output_norm(self.mlp(x))


@dataclass(slots=True, kw_only=True)
class NormedSumBlock:
    """norm(x + attention(x)), then norm(x + mlp(x)) (Vaswani et al. 2017)."""

    attention: BlockAttention
    attention_norm: Map
    mlp: Map
    output_norm: Map

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = self.attention_norm(x + self.attention(x, cos, sin, batch))
        return self.output_norm(x + self.mlp(x))


@dataclass(slots=True, kw_only=True)
class SandwichBlock:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    input_norm: Map
    attention: BlockAttention
    attention_norm: Map
    mlp_norm: Map
    mlp: Map
    output_norm: Map

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(self.input_norm(x), cos, sin, batch))
        return x + self.output_norm(self.mlp(self.mlp_norm(x)))


@dataclass(slots=True, kw_only=True)
class ParallelBlock:
    """x + attention(norm(x)) + mlp(norm(x))."""

    input_norm: Map
    attention: BlockAttention
    mlp: Map
    mlp_norm: Map | None = None
    """None when both parts share a norm."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.input_norm(x)
        inner = normed if self.mlp_norm is None else self.mlp_norm(x)
        return x + self.attention(normed, cos, sin, batch) + self.mlp(inner)
