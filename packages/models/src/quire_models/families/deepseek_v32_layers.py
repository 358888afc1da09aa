"""Modules that only DeepSeek-V3.2 and GLM-5 have.

Shape legend: T tokens of the step, H heads of attention, Hi of the indexer, D their dimension, K tokens that are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.families.deepseek_v32 import SparseLatentSelfAttentionSpec
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.linear import Linear
from quire_models.layers.norm import LayerNorm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import PagedLayout, ops

__all__ = ["LightningIndexer", "SparseLatentAttention"]

KEY_NORM_EPS = 1e-6
FOUND = "slots that the index found"
"""Key of what is derived from a step's layout."""


class LightningIndexer:
    """Scores a token's past with small heads of its own (DeepSeek-V3.2-Exp, eq. 1): their first dimensions are rotated,
    and one key serves all of them."""

    def __init__(self, spec: SparseLatentSelfAttentionSpec, scope: Scope) -> None:
        indexer, hidden = spec.indexer, spec.hidden_size
        assert indexer is not None
        assert spec.q_lora_rank is not None
        heads, size = indexer.num_heads, indexer.head_dim
        self._heads, self._topk = heads, indexer.topk
        self._factor = heads**-0.5 * size**-0.5
        self.queries = Linear(scope / "wq_b", spec.q_lora_rank, heads * size)
        self.key = Linear(scope / "wk", hidden, size)
        self.key_norm = LayerNorm(scope / "k_norm", size, KEY_NORM_EPS)
        self._rotate = Rotary(scope, spec.rotary_dim, interleaved=indexer.interleaved)
        self._weights = (scope / "weights_proj").parameter("weight", heads, hidden, dtype=torch.float32)
        self.weights: Tensor
        self._score = dataclasses.replace(scope, dtype=torch.float32).op(ops.linear)
        self._find = scope.op(ops.index_topk)
        self._locate = scope.op(ops.position_slots)
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weights = self._weights.take()

    def keys(self, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, D], from what the layer `key` makes of x."""
        return self._rotate(self.key_norm(key)[:, None], cos, sin)[:, 0]

    def slots(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, layout: PagedLayout
    ) -> Tensor:
        """[T, K]: where the tokens stand that each token attends to; `latent` [T, q_lora_rank] of its query."""
        query = self._rotate(self.queries(latent).unflatten(-1, (self._heads, -1)), cos, sin)  # [T, Hi, D]
        weights = self._score(x.float(), self.weights, None) * self._factor
        slots: Tensor = self._locate(self._find(query, weights, key_cache, layout, k=self._topk), layout)
        return slots


class SparseLatentAttention(LatentAttention):
    """x [T, hidden_size] -> [T, hidden_size]. No sequence longer than the index finds: over all tokens."""

    def __init__(self, spec: SparseLatentSelfAttentionSpec, index: int, scope: Scope) -> None:
        assert spec.indexer is not None
        self.indexer = None if spec.indexer.is_shared else LightningIndexer(spec, scope / "indexer")
        super().__init__(spec, index, scope, beside=() if self.indexer is None else (self.indexer.key,))
        self._topk, self._width = spec.indexer.topk, spec.kv_lora_rank + spec.rotary_dim
        self._attend_to = scope.op(ops.sparse_latent_attention)

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x; none where the indexer's weights take it, too."""
        return self._down.layers if self.indexer is None else ()

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        cache, layout = batch.of_layer(self.cache)
        latents, keys = cache[..., : self._width], cache[..., self._width :]
        down, row, *index_key = self._down(x)
        self._write(self._row(row, cos, sin), latents, layout.slot_mapping)
        if self.indexer is not None:
            self._write(self.indexer.keys(index_key[0], cos, sin), keys, layout.slot_mapping)
        latent = self._query_latent(down)
        query = self._queries(latent, cos, sin)
        scale, rank = self._spec.scale, self._rank
        if max(layout.kv_lens) <= self._topk:
            return self._output(self._attend(query, latents, layout, scale=scale, rank=rank))
        if self.indexer is not None:  # for the layers behind this one, too
            layout.derived[FOUND] = self.indexer.slots(x, latent, cos, sin, keys, layout)
        return self._output(self._attend_to(query, latents, layout.derived[FOUND], scale=scale, rank=rank))
