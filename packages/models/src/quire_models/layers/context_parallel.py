"""Attention whose cache is interleaved over ranks: decode context parallelism.

The token at position p is with rank p % N of its group of N ranks, all of which have the same key-value heads. Each
rank attends with the queries of all of them to the tokens that it has; what belongs to its own query heads it gets from
the others, and merges it by log-sum-exp.

Shape legend: T tokens of the step, Hq query heads of the rank, Hg of its group, Hkv key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire_attention import Attention, ForwardBatch
from quire_distributed import Collectives
from quire_models.layers.latent_attention import LatentAttention
from quire_models.layers.scope import Scope
from quire_models.mixer_spec import LatentSelfAttentionSpec, SelfAttentionSpec
from quire_models.shards import HeadShard
from quire_ops import PagedLayout, QuantizedTokens, ops, to_device

__all__ = ["ContextLayout", "ContextParallelAttention", "context_layout", "make_latent_attention"]


class ContextLayout(NamedTuple):
    """Where a step's tokens are in the cache of one of the ranks that share it."""

    own: Tensor
    """[N] int64: the tokens of the step that the rank keeps."""
    slot_mapping: Tensor
    """[N] int64: their slots in the rank's cache."""
    layout: PagedLayout
    """The step's sequences as the rank's cache has them; `slot_mapping` is that of all ranks."""
    visible_lens: Tensor
    """[T] int32: of the rank's tokens, how many each token sees."""
    distances: Tensor
    """[T] int64: how far behind the last of these the token stands."""


def context_layout(layout: PagedLayout, rank: int, size: int) -> ContextLayout:
    """Which tokens a rank has of a step's layout, and where; worked out once for all layers of a step.

    Args:
        rank: Number of the rank among those that share the cache.
        size: Their number, which divides the block size.
    """
    found: ContextLayout | None = layout.derived.get(("dcp", rank, size))
    if found is None:
        found = layout.derived["dcp", rank, size] = _context_layout(layout, rank, size)
    return found


def _context_layout(layout: PagedLayout, rank: int, size: int) -> ContextLayout:
    assert layout.paths is None, "trees of tokens are refused at the start"
    device = layout.block_table.device
    spans = zip(layout.query_lens, layout.kv_lens, strict=True)
    places = np.concatenate([np.arange(end - count, end) for count, end in spans])
    own = to_device(np.flatnonzero(places % size == rank), device)
    visible = (places - rank + size) // size
    kv_lens = [(end - 1 - rank + size) // size for end in layout.kv_lens]
    return ContextLayout(
        own=own,
        slot_mapping=layout.slot_mapping[own] // size,
        layout=PagedLayout(
            query_start_loc=layout.query_start_loc,
            seq_lens=to_device(np.array(kv_lens, dtype=np.int32), device),
            block_table=layout.block_table,
            slot_mapping=layout.slot_mapping,
            block_size=layout.block_size // size,
            query_lens=layout.query_lens,
            kv_lens=kv_lens,
        ),
        visible_lens=to_device(visible.astype(np.int32), device),
        distances=to_device(places - (visible - 1) * size - rank, device),
    )


class _ContextGroup:
    """What the ranks that share a cache do together. They are neighbours among the tensor-parallel ones."""

    def __init__(self, scope: Scope, size: int, heads: HeadShard | None) -> None:
        """Args:
        size: Number of the ranks.
        heads: Their query heads; None where each rank computes all.
        """
        assert scope.tp_group is not None
        self._collectives: Collectives = scope.tp_group
        self._size = size
        self._rank = self._collectives.rank % size
        first = self._collectives.rank - self._rank
        self._group = slice(first, first + size)
        self._head_sizes = None if heads is None else heads.query_sizes[heads.dcp_group]
        """Query heads of each of the ranks."""
        self._merge = scope.op(ops.merge_attention_states)

    def layout(self, layout: PagedLayout) -> ContextLayout:
        """Where the rank has a step's tokens."""
        return context_layout(layout, self._rank, self._size)

    def gather(self, query: Tensor) -> Tensor:
        """[T, Hq, D] -> [T, Hg, D]."""
        if self._head_sizes is None:
            return query
        if self._size == self._collectives.size:
            return self._collectives.all_gather(query.contiguous(), dim=1, sizes=self._head_sizes)
        by_head = query.transpose(0, 1)
        return self._exchange([by_head] * self._size, self._head_sizes).transpose(0, 1).contiguous()

    def merge(self, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> Tensor:
        """What the group's heads attended to on this rank, [T, Hg, D] and [T, Hg] -> what this rank's heads attended to
        on all ranks, [T, Hq, D] float32."""
        states = torch.cat((out, lse[..., None]), dim=-1).transpose(0, 1)  # [Hg, T, D + 1]
        if self._head_sizes is None:
            sent: Sequence[Tensor] = [states] * self._size
        else:
            sent = states.split(self._head_sizes)
        num_heads = len(sent[self._rank])
        parts = self._exchange(sent, [num_heads] * self._size).unflatten(0, (self._size, num_heads)).transpose(1, 2)
        return self._merge(parts[..., :-1], parts[..., -1], sinks)

    def _exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """One tensor to each of the ranks, and one from each, joined along dimension 0, where they are `sizes` long."""
        send_sizes, recv_sizes = ([0] * self._collectives.size for _ in range(2))
        send_sizes[self._group] = [len(each) for each in sent]
        recv_sizes[self._group] = sizes
        return self._collectives.all_to_all(torch.cat(list(sent)), send_sizes, recv_sizes)


class ContextParallelAttention(Attention):
    """The attention of one layer whose keys and values are interleaved over ranks."""

    __slots__ = ("_attend_part", "_context", "_size")

    def __init__(self, scope: Scope, spec: SelfAttentionSpec, layer: int, **options: Any) -> None:
        """Args:
        scope: Of the attention.
        options: As those of `Attention`; slopes are those of the heads of the rank's group, [Hg].
        """
        super().__init__(scope.attention_backend, layer, **options)
        self._size = spec.dcp_size
        self._context = _ContextGroup(scope, spec.dcp_size, spec.heads)
        self._attend_part = scope.op(ops.paged_attention_with_lse)
        scope.attentions[scope.prefix] = self

    @property
    def rotates(self) -> bool:
        return False

    def write(self, key: Tensor, value: Tensor, batch: ForwardBatch) -> None:
        """Of the keys and values [T, Hkv, D] of the step's tokens, those that the rank keeps into its cache."""
        kv_cache, metadata = batch.of_layer(self._layer)
        places = self._context.layout(metadata)
        if len(places.own):
            key, value = key[places.own], value[places.own]
            self._backend.write_kv_cache(key, value, kv_cache, places.slot_mapping, self.kv_scale)

    def attend(self, query: Tensor, batch: ForwardBatch, sinks: Tensor | None = None) -> Tensor:
        """query [T, Hq, D] -> [T, Hq, D] over what is in the caches of all ranks."""
        kv_cache, metadata = batch.of_layer(self._layer)
        places, slopes = self._context.layout(metadata), self._alibi_slopes
        out, lse = self._attend_part(
            self._context.gather(query),
            kv_cache,
            places.layout,
            places.visible_lens,
            scale=self._scale,
            soft_cap=self._soft_cap,
            kv_scale=self.kv_scale,
            alibi_slopes=None if slopes is None else slopes * self._size,
        )
        if slopes is not None:  # scores lose more where the rank's last token stands before the query's
            lse = lse - slopes * places.distances[:, None]
        return self._context.merge(out, lse, sinks).to(query.dtype)


class ContextParallelLatentAttention(LatentAttention):
    """Latent attention whose latents are interleaved over ranks."""

    def __init__(self, spec: LatentSelfAttentionSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its cache in a batch.
        scope: Scope of the attention itself.
        """
        super().__init__(spec, index, scope)
        self._context = _ContextGroup(scope, spec.dcp_size, None)
        self._attend_part = scope.op(ops.latent_attention_with_lse)

    def fused_weights(self) -> Any:
        """None: ranks attend op by op."""
        return None

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        latent_cache, metadata = batch.of_layer(self.cache)
        places = self._context.layout(metadata)
        down, latent = self._down(x)
        if len(places.own):
            rows = self._row(latent, cos, sin)[places.own]
            self._write(rows, latent_cache, places.slot_mapping, self._rank)
        query = self._context.gather(self._queries(self._query_latent(down), cos, sin))
        out, lse = self._attend_part(
            query, latent_cache, places.layout, places.visible_lens, scale=self._spec.scale, rank=self._rank
        )
        return self._output(self._context.merge(out, lse).to(query.dtype))


def make_latent_attention(spec: LatentSelfAttentionSpec, index: int, scope: Scope) -> LatentAttention:
    """The latent attention that a record describes; arguments as those of its class."""
    return (LatentAttention if spec.dcp_size == 1 else ContextParallelLatentAttention)(spec, index, scope)
