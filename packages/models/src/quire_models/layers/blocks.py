"""The ways in which attention and feed-forward network stand in a decoder layer, for `DecoderLM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import OffsetRMSNorm, RMSNorm
from quire_models.layers.scope import Scope
from quire_ops import DecoderLayerWeights

__all__ = [
    "BlockAttention",
    "ParallelBlock",
    "PostLNBlock",
    "PostNormBlock",
    "PreNormBlock",
    "SandwichBlock",
    "StackedBlock",
    "pre_norm_block",
    "stacked",
]

Map = Callable[[Tensor], Tensor]
"""[T, hidden_size] -> [T, hidden_size]."""


class BlockAttention(Protocol):
    """The attention of a layer."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""


@runtime_checkable
class StackedBlock(Protocol):
    """A layer that op `decoder_stack` may compute."""

    def stack_weights(self, eps: float) -> DecoderLayerWeights | None:
        """The layer as data, or None when that op cannot compute it.

        Args:
            eps: Of the stack's norms.
        """


def stacked(
    eps: float, attention: BlockAttention, mlp: Map, norms: Mapping[str, Map | None], **fields: Any
) -> DecoderLayerWeights | None:
    """A layer as data for op `decoder_stack`, or None when that op cannot compute it.

    Args:
        eps: Of the stack's norms.
        norms: Field of `DecoderLayerWeights` -> the norm, None for none.
        fields: Others of its fields.
    """
    if not isinstance(attention, SelfAttention) or not isinstance(mlp, GatedMLP | SparseMoE):
        return None
    of_attention, of_mlp = attention.stack_weights(eps), mlp.stack_weights()
    if of_attention is None or of_mlp is None:
        return None
    weights: dict[str, Any] = {}
    for name, norm in norms.items():
        if norm is not None and not (isinstance(norm, RMSNorm | OffsetRMSNorm) and norm.eps == eps):
            return None
        weights[name] = None if norm is None else norm.weight
    return DecoderLayerWeights(**of_attention, **of_mlp, **weights, **fields)


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

    def stack_weights(self, eps: float) -> DecoderLayerWeights | None:
        """See `StackedBlock`."""
        norms = {"input_norm": self.input_norm, "feed_forward_norm": self.mlp_norm}
        return stacked(eps, self.attention, self.mlp, norms)


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

    def stack_weights(self, eps: float) -> DecoderLayerWeights | None:
        """See `StackedBlock`."""
        norms = {
            "input_norm": None,
            "attention_out_norm": self.attention_norm,
            "feed_forward_norm": None,
            "feed_forward_out_norm": self.output_norm,
        }
        return stacked(eps, self.attention, self.mlp, norms)


@dataclass(slots=True, kw_only=True)
class PostLNBlock:
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

    def stack_weights(self, eps: float) -> DecoderLayerWeights | None:
        """See `StackedBlock`."""
        norms = {
            "input_norm": self.input_norm,
            "attention_out_norm": self.attention_norm,
            "feed_forward_norm": self.mlp_norm,
            "feed_forward_out_norm": self.output_norm,
        }
        return stacked(eps, self.attention, self.mlp, norms)


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


def pre_norm_block(config: ModelConfig, scope: Scope, attention: BlockAttention, mlp: Map) -> PreNormBlock:
    """A layer of Llama's shape, under the names that it has in most checkpoints."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return PreNormBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        attention=attention,
        mlp_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        mlp=mlp,
    )
