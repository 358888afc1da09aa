"""Attention of encoders, in both directions, and of decoders to what an encoder read.

Shape legend: T tokens of the step (the decoder's), E tokens that the encoder reads in it, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_feed_forward, class_of, within
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.layers.gathered_heads import GatherHeads
from quire_models.layers.linear import Linear, stack_weights, unadapted_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.mlp import MLP, GatedMLP
from quire_models.layers.norm import FusableNorm, make_norm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.spec import LayerSpec
from quire_ops import CrossAttentionWeights, EncoderAttentionWeights, EncoderLayerWeights, GatedWeights, MLPWeights, ops

__all__ = ["CrossAttention", "EncoderAttention", "EncoderLayer"]


class EncoderAttention:
    """x [E, hidden_size] -> [E, hidden_size]: every token attends to all tokens of its own input."""

    __slots__ = (
        "_attend",
        "_gather",
        "_head_dim",
        "_key_norm",
        "_look_ahead",
        "_qkv",
        "_query_norm",
        "_rotary",
        "_scale",
        "_window",
        "key",
        "out",
        "query",
        "rotary_dim",
        "value",
    )

    rotary_dim: int
    """Dimensions of a head that are rotated."""

    def __init__(self, spec: EncoderAttentionSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the attention itself.
        """
        self.query, self.key, self.value, self.out = (Linear.of(scope, each) for each in spec.projections())
        self._qkv = MergedLinear(scope, self.query, self.key, self.value)
        self._query_norm = None if spec.q_norm is None else make_norm(spec.q_norm, scope)
        self._key_norm = None if spec.k_norm is None else make_norm(spec.k_norm, scope)
        self._rotary: Rotary | None = None
        if spec.rope is not None:
            size = spec.head_dim
            self._rotary = Rotary(scope, spec.rotary_dim, head_dim=size, interleaved=spec.interleaved)
        self.rotary_dim = spec.rotary_dim
        self._gather = GatherHeads.of(spec.heads, spec.head_dim, scope)
        self._attend = scope.op(ops.encoder_attention)
        self._head_dim, self._scale = spec.head_dim, spec.scale
        self._window, self._look_ahead = spec.sliding_window, spec.look_ahead

    def __call__(
        self,
        x: Tensor,
        lens: list[int],
        rotation: tuple[Tensor, Tensor] | None = None,
        position_bias: Tensor | None = None,
        key_lens: list[int] | None = None,
    ) -> Tensor:
        """Args:
        lens: Tokens of each input, which stand one behind the other in x.
        rotation: Cosines and sines [E, 1, D] of queries and keys; None for none.
        position_bias: [H, distances], which op `encoder_attention` adds to the scores; None for none.
        key_lens: Tokens of each input, from its first, that are attended to; None for all.
        """
        query, key, value = (each.view(len(x), -1, self._head_dim) for each in self._qkv(x))
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        if self._rotary is not None and rotation is not None:
            query, key = self._rotary(query, *rotation), self._rotary(key, *rotation)
        attended = self._attend(
            query, key, value, lens, scale=self._scale, window=self._window, bias=position_bias, key_lens=key_lens,
            look_ahead=self._look_ahead,
        )  # fmt: skip
        return self.out(self._gather(attended.flatten(1)))

    def fused_weights(self, rotation: int | None, position_bias: Tensor | None) -> EncoderAttentionWeights | None:
        """The attention as data for op `encoder_stack`; None where that op cannot compute it, or a linear method keeps
        other forms of its weights.

        Args:
            rotation: Which of the pass's rotations it has; None for none.
            position_bias: As of a call.
        """
        weights = unadapted_weights(q=self.query, k=self.key, v=self.value, o=self.out)
        if weights is None or self._query_norm is not None or self._key_norm is not None:
            return None
        if self._look_ahead is not None or (self._rotary is not None and self._rotary.interleaved):
            return None
        return EncoderAttentionWeights(
            **weights,
            num_heads=self.query.shape[0] // self._head_dim,
            scale=self._scale,
            bias=position_bias,
            sliding_window=self._window,
            rotation=rotation if self._rotary is not None else None,
        )


class CrossAttention:
    """x [T, hidden_size] -> [T, hidden_size]: the decoder's tokens attend to all that the encoder read."""

    __slots__ = (
        "_attention",
        "_gather",
        "_key_and_value",
        "_num_heads",
        "cache",
        "key",
        "out",
        "query",
        "spec",
        "value",
    )

    def __init__(self, spec: EncoderAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        """
        self.query, self.key, self.value, self.out = (Linear.of(scope, each) for each in spec.projections())
        self._key_and_value = MergedLinear(scope, self.key, self.value)
        self._attention = scope.attention(index, scale=spec.scale)
        self.spec, self.cache = spec, index
        self._gather = GatherHeads.of(spec.heads, spec.head_dim, scope)
        self._num_heads = spec.num_heads

    def fused_weights(self) -> CrossAttentionWeights | None:
        """The attention as data for op `decoder_stack`, or None when that op cannot compute it."""
        weights = stack_weights(q=self.query, o=self.out)
        if weights is None or self.spec.heads is not None:
            return None
        return CrossAttentionWeights(
            **weights,
            num_kv_heads=self._num_heads,
            head_dim=self.spec.head_dim,
            scale=self.spec.scale,
            kv_scale=self._attention.kv_scale,
        )

    def write(self, encoded: Tensor, batch: ForwardBatch) -> None:
        """Keep keys and values of what the encoder made of `batch.encoder`, [E, hidden_size]."""
        key, value = (each.view(len(encoded), self._num_heads, -1) for each in self._key_and_value(encoded))
        self._attention.write(key, value, batch)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        query = self.query(x).view(len(x), self._num_heads, -1)
        return self.out(self._gather(self._attention.attend(query, batch).flatten(1)))


class EncoderLayer:
    """x + f * out(attention(norm(x))), then x + f * out(feed_forward(norm(x))), where `norm` and `out` are norms of
    their own for each part, as far as there are any; or norms behind the sums."""

    def __init__(self, spec: LayerSpec, scope: Scope) -> None:
        """Args:
        scope: Scope of the layer.
        """
        attention = spec.mixers[0]
        assert isinstance(attention, EncoderAttentionSpec)
        assert spec.feed_forward is not None
        own: str = getattr(attention, "built_by", "")
        make = class_of(own) if own else EncoderAttention
        self.attention: EncoderAttention = make(attention, within(scope, attention.name))
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self._is_post_ln = spec.arrangement == "post_ln"
        first, second = spec.input_norm, spec.feed_forward_norm
        first_out, second_out = spec.attention_out_norm, spec.feed_forward_out_norm
        if self._is_post_ln:
            first, second, first_out, second_out = first_out, second_out, None, None
        norms = [None if norm is None else make_norm(norm, scope) for norm in (first, second, first_out, second_out)]
        self._attention_norm, self._feed_forward_norm, self._attention_out_norm, self._feed_forward_out_norm = norms
        self._residual_factor = spec.residual_factor

    def __call__(
        self,
        x: Tensor,
        lens: list[int],
        rotation: tuple[Tensor, Tensor] | None = None,
        position_bias: Tensor | None = None,
        key_lens: list[int] | None = None,
    ) -> Tensor:
        """x [E, hidden_size] -> [E, hidden_size]; `EncoderAttention` says what the other arguments are."""
        norm, feed_forward_norm = self._attention_norm, self._feed_forward_norm
        if self._is_post_ln:
            x = x + self.attention(x, lens, rotation, position_bias, key_lens)
            x = x if norm is None else norm(x)
            x = x + self.feed_forward(x)
            return x if feed_forward_norm is None else feed_forward_norm(x)
        attended = self.attention(x if norm is None else norm(x), lens, rotation, position_bias, key_lens)
        x = x + self._added(attended, self._attention_out_norm)
        mapped = self.feed_forward(x if feed_forward_norm is None else feed_forward_norm(x))
        return x + self._added(mapped, self._feed_forward_out_norm)

    def _added(self, x: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """What a part gives, x [E, hidden_size], as it is added to the residual stream."""
        x = x if norm is None else norm(x)
        return x if self._residual_factor == 1.0 else x * self._residual_factor

    def fused_weights(self, rotation: int | None, position_bias: Tensor | None) -> EncoderLayerWeights | None:
        """The layer as data for op `encoder_stack`; None where that op cannot compute it. Arguments as
        `EncoderAttention.fused_weights` takes them."""
        if self._attention_out_norm is not None or self._feed_forward_out_norm is not None:
            return None
        attention = self.attention.fused_weights(rotation, position_bias)
        part = self.feed_forward.fused_weights() if isinstance(self.feed_forward, GatedMLP | MLP) else None
        if attention is None or not isinstance(part, GatedWeights | MLPWeights) or self._residual_factor != 1.0:
            return None
        norm, feed_forward_norm = self._attention_norm, self._feed_forward_norm
        if not isinstance(norm, FusableNorm | None) or not isinstance(feed_forward_norm, FusableNorm):
            return None
        return EncoderLayerWeights(
            attention=attention,
            attention_norm=None if norm is None else norm.fused_weights(),
            feed_forward=part,
            feed_forward_norm=feed_forward_norm.fused_weights(),
            is_post_ln=self._is_post_ln,
        )
