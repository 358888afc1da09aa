"""Random paged layouts for kernel tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire_ops.kv_format import SCALE_BYTES, encode_rows, rows_of


@dataclass
class Layout:
    block_table: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor
    block_size: int
    query_lens: list[int]
    kv_lens: list[int]
    seq_lens: Tensor = field(init=False)
    paths: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seq_lens = torch.tensor(self.kv_lens, dtype=torch.int32)


def random_layout(
    rng: random.Random, lens: list[tuple[int, int]], block_size: int, *, shuffle: bool
) -> tuple[Layout, int]:
    """lens: (query_len, kv_len) of each sequence. Returns the layout and the number of blocks, null block included."""
    counts = [-(-kv_len // block_size) for _, kv_len in lens]
    ids = list(range(1, sum(counts) + 1))
    if shuffle:
        rng.shuffle(ids)
    tables, slots, starts = [], [], [0]
    for (query_len, kv_len), count in zip(lens, counts, strict=True):
        table, ids = ids[:count], ids[count:]
        tables.append(table + [0] * (max(counts) - count))
        slots += [
            table[p // block_size] * block_size + p % block_size for p in range(max(kv_len - query_len, 0), kv_len)
        ]
        starts.append(starts[-1] + query_len)
    layout = Layout(
        block_table=torch.tensor(tables, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_size=block_size,
        query_lens=[query_len for query_len, _ in lens],
        kv_lens=[kv_len for _, kv_len in lens],
    )
    return layout, sum(counts) + 1


def encoded_cache(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """A cache with the keys and values x [num_blocks, 2, Hkv, block_size, D]. scale: as in `encode_rows`."""
    rows = encode_rows(x, dtype, scale)
    row_size = rows[0].shape[-1] + (SCALE_BYTES if len(rows) > 1 else 0)
    cache = torch.empty(*x.shape[:-1], row_size, dtype=dtype)
    for places, part in zip(rows_of(cache), rows, strict=True):
        places.copy_(part)
    return cache


def poisoned_cache(layout: Layout, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random keys and values in the slots of known tokens, NaN in every other slot."""
    cache = torch.full((num_blocks, 2, num_kv_heads, layout.block_size, head_dim), float("nan"), dtype=dtype)
    for table, kv_len in zip(layout.block_table.tolist(), layout.kv_lens, strict=True):
        for position in range(kv_len):
            block, offset = divmod(position, layout.block_size)
            cache[table[block], :, :, offset] = torch.randn(2, num_kv_heads, head_dim).to(dtype)
    return cache


def grow_trees(layout: Layout, roots: dict[int, int], rng: random.Random) -> dict[int, list[int]]:
    """Give the layout paths. Returns token of the step -> the places that it sees.

    roots: sequence -> where its tree begins: the last ones of the places behind it are this step's tokens."""
    paths: dict[int, list[int]] = {}
    width = 2 + max(layout.kv_lens[row] - root for row, root in roots.items())
    layout.paths = torch.full((sum(layout.query_lens), width), -1, dtype=torch.int32)
    for row, root in roots.items():
        kv_len, token = layout.kv_lens[row], sum(layout.query_lens[:row])
        ways = {root: [root]}
        for place in range(root + 1, kv_len):
            ways[place] = [*ways[rng.randrange(root, place)], place]
        for place in range(kv_len - layout.query_lens[row], kv_len):
            way = ways[place]
            layout.paths[token, : 2 + len(way)] = torch.tensor([root + len(way) - 1, root, *way])
            paths[token] = [*range(root), *way]
            token += 1
    return paths
