"""Attention of encoders, in both directions, and of decoders to what an encoder read.

Shape legend: T tokens of the step (the decoder's), E tokens that the encoder reads in it, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quire_attention import EncoderBatch, ForwardBatch
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["CrossAttention", "EncoderAttention", "ProjectionNames"]


class ProjectionNames(NamedTuple):
    """Names of an attention's matrices in the checkpoint."""

    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    out: str = "out_proj"


BART_NAMES = ProjectionNames()


class EncoderAttention:
    """x [E, hidden_size] -> [E, hidden_size]: every token attends to all tokens of its own input."""

    __slots__ = ("_attend", "_num_heads", "_qkv", "_scale", "_window", "key", "out", "query", "value")

    def __init__(
        self,
        scope: Scope,
        hidden: int,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool,
        scale: float | None = None,
        window: int | None = None,
        names: ProjectionNames = BART_NAMES,
    ) -> None:
        """Args:
        scale: Factor of the scores; None for head_dim ** -0.5.
        window: Tokens see those at most so far away; None for all.
        """
        width = num_heads * head_dim
        self.query = Linear(scope / names.query, hidden, width, bias=bias)
        self.key = Linear(scope / names.key, hidden, width, bias=bias)
        self.value = Linear(scope / names.value, hidden, width, bias=bias)
        self._qkv = MergedLinear(scope, self.query, self.key, self.value)
        self.out = Linear(scope / names.out, width, hidden, bias=bias)
        self._attend = scope.op(ops.encoder_attention)
        self._num_heads = num_heads
        self._scale = head_dim**-0.5 if scale is None else scale
        self._window = window

    def __call__(
        self,
        x: Tensor,
        batch: EncoderBatch,
        position_bias: Tensor | None = None,
        rotate: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Args:
        position_bias: See op `encoder_attention`.
        rotate: Rotation of queries and keys, [E, H, D] -> [E, H, D].
        """
        query, key, value = (each.view(len(x), self._num_heads, -1) for each in self._qkv(x))
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        attended = self._attend(
            query, key, value, batch.lens, scale=self._scale, window=self._window, bias=position_bias
        )
        return self.out(attended.flatten(1))


class CrossAttention:
    """x [T, hidden_size] -> [T, hidden_size]: the decoder's tokens attend to all that the encoder read."""

    __slots__ = ("_attention", "_key_and_value", "_num_heads", "key", "out", "query", "value")

    def __init__(
        self,
        scope: Scope,
        index: int,
        hidden: int,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool,
        scale: float | None = None,
        names: ProjectionNames = BART_NAMES,
    ) -> None:
        """Args:
        index: Which cache of a batch is its own.
        scale: Factor of the scores; None for head_dim ** -0.5.
        """
        width = num_heads * head_dim
        self.query = Linear(scope / names.query, hidden, width, bias=bias)
        self.key = Linear(scope / names.key, hidden, width, bias=bias)
        self.value = Linear(scope / names.value, hidden, width, bias=bias)
        self._key_and_value = MergedLinear(scope, self.key, self.value)
        self.out = Linear(scope / names.out, width, hidden, bias=bias)
        self._attention = scope.attention(index, scale=head_dim**-0.5 if scale is None else scale)
        self._num_heads = num_heads

    def write(self, encoded: Tensor, batch: ForwardBatch) -> None:
        """Keep keys and values of what the encoder made of `batch.encoder`, [E, hidden_size]."""
        key, value = (each.view(len(encoded), self._num_heads, -1) for each in self._key_and_value(encoded))
        self._attention.write(key, value, batch)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        query = self.query(x).view(len(x), self._num_heads, -1)
        return self.out(self._attention.attend(query, batch).flatten(1))
