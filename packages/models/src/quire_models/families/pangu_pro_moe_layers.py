"""The attention of openPangu Pro MoE V2.

Shape legend: T tokens of the step, H heads, K key-value heads, S learned keys, D and V dimensions of a key and of a
value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.mimo_v2_flash_layers import NarrowValueAttention
from quire_models.families.pangu_pro_moe import LearnedSinkSpec
from quire_models.layers.norm import make_norm
from quire_models.layers.rope_and_cache import HeadNorms, RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["LearnedSinkAttention"]


class LearnedSinkAttention(NarrowValueAttention):
    """x [T, hidden_size] -> [T, hidden_size]; what heads attend to in the cache is merged with what they attend to in
    the learned keys, by log-sum-exp."""

    __slots__ = ("_attend_part", "_key_norm", "_keys", "_merge", "_rotary_dim", "_scale", "_sink_parameters", "_values")

    def __init__(self, spec: LearnedSinkSpec, index: int, scope: Scope) -> None:
        super().__init__(spec, index, scope)
        assert spec.k_norm is not None
        self._key_norm = make_norm(spec.k_norm, scope)
        self._scale, self._rotary_dim = spec.scale, spec.rotary_dim
        rotary = Rotary(scope, spec.rotary_dim, head_dim=spec.head_dim, interleaved=True)
        self._write = RopeAndCache(self._attend, rotary, HeadNorms(lambda query: query, self._key_norm))
        self._attend_part = scope.op(ops.paged_attention_with_lse)
        self._merge = scope.op(ops.merge_attention_states)
        self._sink_parameters = [scope.parameter(name, *shape) for name, shape in spec.sink_shapes().items()]
        self._keys: Tensor
        """[S, K, D], their dimensions in the order that `Rotary` gives queries."""
        self._values: Tensor
        """[S, K, D], with zeros behind V."""
        scope.when_loaded(self._finish_sinks)

    def _finish_sinks(self) -> None:
        keys, *values = (parameter.take() for parameter in self._sink_parameters)
        keys, size = self._key_norm(keys.contiguous()), self._rotary_dim
        self._keys = torch.cat((keys[..., :size:2], keys[..., 1:size:2], keys[..., size:]), dim=-1).float()
        wide = F.pad(values[0], (0, self._head_dim - self._value_dim)) if values else torch.zeros_like(keys)
        self._values = wide.float()

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = self._qkv(x)
        wide = F.pad(value.unflatten(-1, (-1, self._value_dim)), (0, self._head_dim - self._value_dim))
        query = self._write(self._heads(query), self._heads(key), wide, cos, sin, batch)
        cache, layout = batch.of_layer(self.cache)
        visible = (batch.positions + 1).to(torch.int32)
        out, lse = self._attend_part(
            query, cache, layout, visible, scale=self._scale, kv_scale=self._attend.kv_scale
        )  # [T, H, D], [T, H]
        of_sinks, lse_of_sinks = self._to_sinks(query.float())
        merged = self._merge(torch.stack((out, of_sinks)), torch.stack((lse, lse_of_sinks)))
        return self.o_proj(merged[..., : self._value_dim].flatten(1).to(query.dtype))

    def _to_sinks(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """query [T, H, D] -> what its heads attend to in the learned keys, [T, H, D], and the log-sum-exp of their
        scores, [T, H]."""
        grouped = query.unflatten(1, (self._keys.shape[1], -1))
        scores = torch.einsum("tkgd,skd->tkgs", grouped, self._keys) * self._scale
        attended = torch.einsum("tkgs,skd->tkgd", scores.softmax(dim=-1), self._values)
        return attended.flatten(1, 2), scores.logsumexp(dim=-1).flatten(1)
