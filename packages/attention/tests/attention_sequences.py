"""Sequences that go through a layer's attention in random steps, and what each token must get, densely in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_ops import PagedLayout, kv_cache_shape

__all__ = ["Options", "Sequences", "Shape", "batch_of", "dense"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer and of its cache."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """What changes scores, of `Attention`; `sinks` and `slopes` only whether there are some."""

    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    slopes: bool = False


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: Options = Options(),
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Causal attention of a whole sequence: query [L, Hq, D], key and value [L, Hkv, D] -> [L, Hq, D] float64."""
    length, group = len(query), query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    place = torch.arange(length)
    distance = place[:, None] - place
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance
    seen = distance >= 0
    if options.sliding_window is not None:
        seen &= distance < options.sliding_window
    if chunk_tokens is not None:
        seen &= place[:, None] // chunk_tokens == place // chunk_tokens
    weights = torch.where(seen, scores.exp(), 0.0)  # scores are small numbers here
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / total, value)


@dataclass
class Sequences:
    """Some sequences on one paged cache, whose unwritten slots hold NaN."""

    shape: Shape
    lens: Sequence[int]
    rng: random.Random
    dtype: torch.dtype = torch.float32
    tensors: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)
    """Of each sequence: query [L, Hq, D], key and value [L, Hkv, D]."""
    tables: list[list[int]] = field(init=False)
    done: list[int] = field(init=False)
    outputs: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.tensors = []
        for length in self.lens:
            query, key, value = (torch.randn(length, each, shape.head_dim).to(self.dtype) for each in heads)
            self.tensors.append((query, key, value))
        counts = [-(-length // shape.block_size) for length in self.lens]
        ids = list(range(1, 1 + sum(counts)))
        self.rng.shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.done = [0] * len(self.lens)
        self.outputs = [[] for _ in self.lens]

    def cache(self, dtype: torch.dtype | None = None, row_size: int | None = None) -> Tensor:
        """An empty cache for all of them; what has not been written is no number."""
        num_blocks = 1 + sum(map(len, self.tables))
        size = self.shape.head_dim if row_size is None else row_size
        shape = kv_cache_shape(num_blocks, self.shape.block_size, self.shape.kv_heads, size)
        cache = torch.empty(shape, dtype=dtype or self.dtype)
        cache.view(torch.uint8).fill_(255)  # NaN, or the NaN of a scale, in every format
        return cache

    def next_step(self) -> dict[int, int] | None:
        """Sequence -> tokens of the next step, in random order; None when all are done."""
        left = {i: length - self.done[i] for i, length in enumerate(self.lens) if self.done[i] < length}
        if not left:
            return None
        order = self.rng.sample(list(left), self.rng.randint(1, len(left)))
        return {i: 1 if self.rng.random() < 0.5 else self.rng.randint(1, left[i]) for i in order}

    def metadata(self, counts: dict[int, int]) -> PagedLayout:
        """Where the tokens of a step are."""
        size, starts, slots = self.shape.block_size, [0], []
        ends = {i: self.done[i] + count for i, count in counts.items()}
        width = max(-(-end // size) for end in ends.values())
        for i, end in ends.items():
            starts.append(starts[-1] + counts[i])
            slots += [self.tables[i][p // size] * size + p % size for p in range(self.done[i], end)]
        tables = [(self.tables[i] + [0] * width)[:width] for i in counts]
        return PagedLayout(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(list(ends.values()), dtype=torch.int32),
            block_table=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_size=size,
            query_lens=list(counts.values()),
            kv_lens=list(ends.values()),
        )

    def of_step(self, counts: dict[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a step's tokens."""
        parts = [[x[self.done[i] : self.done[i] + n] for x in self.tensors[i]] for i, n in counts.items()]
        query, key, value = (torch.cat(each) for each in zip(*parts, strict=True))
        return query, key, value

    def positions(self, counts: dict[int, int]) -> Tensor:
        """[T] int64."""
        return torch.cat([torch.arange(self.done[i], self.done[i] + n) for i, n in counts.items()])

    def take(self, out: Tensor, counts: dict[int, int]) -> None:
        """A step is done: `out` [T, Hq, D] is what its tokens got."""
        for (i, count), piece in zip(counts.items(), out.split(list(counts.values())), strict=True):
            self.outputs[i].append(piece)
            self.done[i] += count

    def results(self) -> list[Tensor]:
        """Of each sequence [L, Hq, D]."""
        return [torch.cat(pieces) for pieces in self.outputs]


def batch_of(metadata: Sequence[PagedLayout], caches: Sequence[Tensor], groups: Sequence[int]) -> ForwardBatch:
    """A step of layers without token ids."""
    num_tokens = sum(metadata[0].query_lens)
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        attention=tuple(metadata),
        group_of_layer=tuple(groups),
        kv_caches=tuple(caches),
    )
