"""Modules of DeepSeek-V3.2, GLM-5, and other networks with lightning indexers.

Shape legend: T tokens of the step, H heads of attention, Hi of the indexer, D their dimension, K tokens that are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_interfaces import FP8_DS_MLA
from quire_models.families.deepseek_v32 import SparseLatentSelfAttentionSpec
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.linear import Linear
from quire_models.layers.norm import LayerNorm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_ops import PagedLayout, ops, split_latent_cache

__all__ = ["LightningIndexer", "SparseLatentAttention"]

KEY_NORM_EPS = 1e-6
FOUND = "slots that the index found"
"""Key of what is derived from a step's layout."""


class LightningIndexer:
    """Scores a token's past with small heads of its own (DeepSeek-V3.2-Exp, eq. 1): their first dimensions are rotated,
    and one key serves all of them."""

    key_norm_eps = KEY_NORM_EPS

    def __init__(self, spec: SparseLatentSelfAttentionSpec, scope: Scope) -> None:
        indexer, hidden = spec.indexer, spec.hidden_size
        assert indexer is not None
        assert spec.q_lora_rank is not None
        heads, size = indexer.num_heads, indexer.head_dim
        self._heads, self._topk = heads, indexer.topk
        self._factor = heads**-0.5 * size**-0.5
        self.queries = Linear(scope / "wq_b", spec.q_lora_rank, heads * size)
        self.key = Linear(scope / "wk", hidden, size)
        self.key_norm = LayerNorm(scope / "k_norm", size, self.key_norm_eps)
        self._rotary_dim = spec.rotary_dim
        self._rotate = Rotary(scope, spec.rotary_dim, interleaved=indexer.interleaved)
        self._weights = (scope / "weights_proj").parameter("weight", heads, hidden, dtype=torch.float32)
        self.weights: Tensor
        self._score = dataclasses.replace(scope, dtype=torch.float32).op(ops.linear)
        # Behind latents in fp8, its keys are in bfloat16.
        of_keys = dataclasses.replace(
            scope, cache_dtype="bfloat16" if scope.cache_dtype == FP8_DS_MLA else scope.cache_dtype
        )
        self._find = of_keys.op(ops.index_topk)
        self._locate = scope.op(ops.position_slots)
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.weights = self._weights.take()

    @property
    def of_input(self) -> tuple[Linear, ...]:
        """The layers that make what it keeps of a token, of x."""
        return (self.key,)

    def keys(self, made: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """What it keeps of each token, [T, D], from what the layers `of_input` make of x."""
        return self._rotated(self.key_norm(made[0])[:, None], cos, sin)[:, 0]

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, Hi, D] queries, or [T, 1, D] keys, whose dimensions may change their order in the same way."""
        return self._rotate(heads, cos, sin)

    def slots(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, layout: PagedLayout
    ) -> Tensor:
        """[T, K]: where the tokens stand that each token attends to; `latent` [T, q_lora_rank] of its query."""
        query = self._rotated(self.queries(latent).unflatten(-1, (self._heads, -1)), cos, sin)
        weights = self._score(x.float(), self.weights, None) * self._factor
        slots: Tensor = self._locate(self._found(query, weights, key_cache, layout), layout)
        return slots

    def _found(self, query: Tensor, weights: Tensor, key_cache: Tensor, layout: PagedLayout) -> Tensor:
        """[T, K] positions."""
        return self._find(query, weights, key_cache, layout, k=self._topk)


class SparseLatentAttention(LatentAttention):
    """x [T, hidden_size] -> [T, hidden_size]. No sequence longer than the index finds: over all tokens."""

    make_indexer: ClassVar[type[LightningIndexer]] = LightningIndexer
    is_gated: ClassVar[bool] = False
    """`_gated_queries` gives gates, too."""

    def __init__(
        self,
        spec: SparseLatentSelfAttentionSpec,
        index: int,
        scope: Scope,
        *,
        beside: Sequence[Linear] = (),
    ) -> None:
        """Args:
        beside: See `LatentAttention`.
        """
        assert spec.indexer is not None
        self.indexer = None if spec.indexer.is_shared else self.make_indexer(spec, scope / "indexer")
        own = () if self.indexer is None else self.indexer.of_input
        super().__init__(spec, index, scope, beside=(*own, *beside))
        self._topk, self._width = spec.indexer.topk, spec.kv_lora_rank + spec.rotary_dim
        self._attend_to = scope.op(ops.sparse_latent_attention)
        self._gate = scope.op(ops.sigmoid_and_mul) if self.is_gated else None

    @property
    def consumers(self) -> Sequence[Linear]:
        """The linear layers that take x; none where the indexer's weights take it, too."""
        return self._down.layers if self.indexer is None else ()

    def __call__(self, x: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        cache, layout = batch.of_layer(self.cache)
        latents, keys = split_latent_cache(cache, self._width, self._rank)
        down, row, *beside = self._down(x)
        self._write(self._row(row, cos, sin), latents, layout.slot_mapping, self._rank)
        if self.indexer is not None:
            count = len(self.indexer.of_input)
            made, beside = beside[:count], beside[count:]
            self._write(self.indexer.keys(made, cos, sin), keys, layout.slot_mapping)
        latent = self._query_latent(down)
        query, gate = self._gated_queries(latent, down, beside, cos, sin)
        slots = None
        if max(layout.kv_lens) > self._topk:
            if self.indexer is not None:  # for the layers behind this one, too
                layout.derived[FOUND] = self.indexer.slots(x, latent, cos, sin, keys, layout)
            slots = layout.derived[FOUND]
        attended = self._attended(query, latents, slots, batch)
        if gate is None or self._gate is None:
            return self._output(attended)
        return self._project(self._gate(gate, self._multiply(attended, self._value).flatten(1)))

    def _gated_queries(
        self, latent: Tensor, down: Tensor, beside: list[Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Queries as `_queries` gives them, and gates [T, H * V] of what heads give, before their sigmoid; `down`
        [T, q_lora_rank] is the latent before its norm, `beside` what the layers beside give."""
        return self._queries(latent, cos, sin), None

    def _attended(self, query: Tensor, latents: Tensor, slots: Tensor | None, batch: ForwardBatch) -> Tensor:
        """[T, H, R], over the tokens in these slots [T, K]; None for all of a token's past."""
        scale, rank = self._spec.scale, self._rank
        if slots is None:
            return self._attend(query, latents, batch.of_layer(self.cache)[1], scale=scale, rank=rank)
        return self._attend_to(query, latents, slots, scale=scale, rank=rank)
