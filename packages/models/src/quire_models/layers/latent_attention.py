"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1), with the up-projections absorbed.

A token's keys and values of all heads are linear in one latent, which is what the cache keeps, beside one rotated key
that all heads share. Instead of making keys, queries are taken to the latent: q . (W_k c) = (W_k^T q) . c; instead of
making values, what was attended to is taken from it: sum(w W_v c) = W_v sum(w c).

Shape legend: T tokens of the step, H heads, N and P dimensions of a head without and with rotation, R of the latent,
V of a head's value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.linear import Linear, unadapted_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import LatentSelfAttentionSpec
from quire_ops import LatentAttentionWeights, QuantizedTokens, ops

__all__ = ["LatentAttention"]


def _as_it_is(x: Tensor) -> Tensor:
    return x


class LatentAttention:
    """x [T, hidden_size] -> [T, hidden_size]."""

    def __init__(
        self, spec: LatentSelfAttentionSpec, index: int, scope: Scope, *, beside: Sequence[Linear] = ()
    ) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        beside: Layers of a larger attention that take x too, and have just been made.
        """
        hidden, heads = spec.hidden_size, spec.heads
        self._spec, self.cache = spec, index
        self._rank = spec.kv_lora_rank
        self._group = None if heads is None else scope.tp_group
        self._rank_widths = () if heads is None else tuple(each * spec.v_head_dim for each in heads.query_sizes)
        """What the heads of each rank give, where ranks share them out."""
        if heads is not None:
            scope.head_shards[scope.prefix] = heads
        self._query: Callable[[Tensor], Tensor] = _as_it_is
        self._query_norm: Callable[[Tensor], Tensor] = _as_it_is
        if spec.q_lora_rank is None:
            down = Linear.of(scope, spec.projection("q_proj", hidden, spec.head_dim))
        else:
            down = Linear(scope / "q_a_proj", hidden, spec.q_lora_rank, bias=spec.bias)
            self._query_norm = RMSNorm(scope / "q_a_layernorm", spec.q_lora_rank, spec.norm_eps)
            self._query = Linear.of(scope, spec.query_up)
        latent = Linear(scope / "kv_a_proj_with_mqa", hidden, self._rank + spec.rotary_dim, bias=spec.bias)
        self._down = MergedLinear(scope, down, latent, *beside)
        """x -> what `_query_latent` and `_row` take, and the results of the layers beside them."""
        self._latent_norm = RMSNorm(scope / "kv_a_layernorm", self._rank, spec.norm_eps)
        self._up = self._absorbed(scope / "kv_b_proj")
        self._out = Linear(scope / "o_proj", spec.value_width, hidden, bias=spec.bias)
        self._rotate = Rotary(scope, spec.rotary_dim, interleaved=spec.interleaved)
        self._write = scope.op(ops.write_latent_cache)
        self._attend = scope.op(ops.latent_attention)
        self._multiply = scope.op(ops.head_linear)
        self._reads_rows = scope.device.type == "cpu"
        self._key: Tensor
        """[H, R, N]."""
        self._value: Tensor
        """[H, V, R]."""
        scope.when_loaded(self._absorb)

    def _absorbed(self, scope: Scope) -> Linear:
        # It is never applied to tokens: no adapter can stand on it, and no form but numbers is of use.
        spec = self._spec
        scope = dataclasses.replace(scope, adapters=None)
        up = spec.projection("", self._rank, spec.qk_nope_head_dim + spec.v_head_dim)
        method = None if scope.quantization else scope.plain_method
        return Linear(scope, self._rank, up.out_features, method=method, shard=up.shard, is_replicated=True)

    def _absorb(self) -> None:
        spec = self._spec
        weight = self._up.take_weight().view(spec.num_heads, -1, self._rank)
        key, self._value = weight.split((spec.qk_nope_head_dim, spec.v_head_dim), dim=1)
        # Absorbed, it is multiplied from its other side. Processors read rows, so there it is turned over once.
        self._key = key.transpose(1, 2).contiguous() if self._reads_rows else key.transpose(1, 2)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x."""
        return self._down.layers

    def fused_weights(self) -> LatentAttentionWeights | None:
        """The attention as data for op `decoder_stack`, or None when that op cannot compute it."""
        spec, (q_down, kv_down, *beside) = self._spec, self._down.layers
        weights: dict[str, Any] | None = unadapted_weights(q_down=q_down, kv_down=kv_down, o=self._out)
        if weights is None or beside or not (self._key[0].is_contiguous() and self._value[0].is_contiguous()):
            return None
        query: dict[str, Any] = {}
        if isinstance(self._query, Linear) and isinstance(self._query_norm, RMSNorm):
            up = unadapted_weights(q_up=self._query)
            if up is None:
                return None
            query = {**up, "q_norm": self._query_norm.fused_weights()}
        return LatentAttentionWeights(
            **weights,
            **query,
            kv_norm=self._latent_norm.fused_weights(),
            key_up=self._key,
            value_up=self._value,
            scale=spec.scale,
            interleaved=spec.interleaved,
            rank_widths=self._rank_widths,
        )

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        latent_cache, metadata = batch.of_layer(self.cache)
        down, latent = self._down(x)
        self._write(self._row(latent, cos, sin), latent_cache, metadata.slot_mapping, self._rank)
        query = self._queries(self._query_latent(down), cos, sin)
        attended = self._attend(query, latent_cache, metadata, scale=self._spec.scale, rank=self._rank)
        return self._output(attended)

    def _row(self, latent_and_key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, R + P], what the cache keeps, from the latent before its norm and the key before its rotation."""
        latent, key = latent_and_key.split((self._rank, self._spec.rotary_dim), dim=-1)
        key = self._rotate(key[:, None], cos, sin)[:, 0]
        return torch.cat((self._latent_norm(latent), key), dim=-1)

    def _query_latent(self, down: Tensor) -> Tensor:
        """[T, q_lora_rank] after its norm, or the queries where they have no latent."""
        return self._query_norm(down)

    def _queries(self, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, H, R + P], as they meet the rows of the cache."""
        return self._absorb_key(self._query(latent).unflatten(-1, (self._spec.num_heads, -1)), cos, sin)

    def _absorb_key(self, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, H, N + P] -> [T, H, R + P]."""
        plain, rotated = query.split((self._spec.qk_nope_head_dim, self._spec.rotary_dim), dim=-1)
        absorbed = self._multiply(plain, self._key)  # [T, H, R]
        return torch.cat((absorbed, self._rotate(rotated, cos, sin)), dim=-1)

    def _output(self, attended: Tensor) -> Tensor:
        """[T, H, R] of attended latents -> [T, hidden_size]."""
        return self._project(self._multiply(attended, self._value).flatten(1))

    def _project(self, values: Tensor) -> Tensor:
        """[T, H * V] -> [T, hidden_size]."""
        if self._group is not None:
            values = self._group.all_gather(values.contiguous(), dim=-1, sizes=self._rank_widths)
        return self._out(values)
