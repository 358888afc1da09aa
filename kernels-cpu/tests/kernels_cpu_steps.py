"""Random steps for the tests of this package: sequences, block tables and caches at awkward sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels_cpu.builds import build_name
from quire_ops import SampleTable

__all__ = ["Layout", "make_sample_table", "same_for_each_build"]

same_for_each_build = pytest.mark.skipif(
    (build_name() or "").endswith("-emulated"),
    reason="the same for each build: tested in the run of the processor's",
)


@dataclass
class Layout:
    """A `PagedLayout` of random sequences; slots that belong to nobody hold NaN."""

    block_size: int
    query_lens: list[int]
    kv_lens: list[int]
    block_table: Tensor = field(default_factory=lambda: torch.empty(0))
    """[S, B] int32; left empty, blocks are given out at random."""
    query_start_loc: Tensor = field(init=False)
    seq_lens: Tensor = field(init=False)
    slot_mapping: Tensor = field(init=False)
    paths: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict)
    num_blocks: int = 0

    def __post_init__(self) -> None:
        counts = [-(-length // self.block_size) for length in self.kv_lens]
        if not self.block_table.numel():
            self.num_blocks = sum(counts) + 1
            free = torch.randperm(self.num_blocks - 1).add(1).to(torch.int32)
            self.block_table = torch.zeros(len(counts), max(counts) + 2, dtype=torch.int32)
            for row, (blocks, count) in enumerate(zip(free.split(counts), counts, strict=True)):
                self.block_table[row, :count] = blocks
        self.query_start_loc = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        slots = []
        for row, (query_len, kv_len) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            positions = torch.arange(kv_len - query_len, kv_len)
            blocks = self.block_table[row].long()[positions // self.block_size]
            slots.append(blocks * self.block_size + positions % self.block_size)
        self.slot_mapping = torch.cat(slots)

    def cache(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """[num_blocks, 2, Hkv, block_size, D]: random where a token is, NaN elsewhere."""
        cache = torch.full((self.num_blocks, 2, num_kv_heads, self.block_size, head_dim), float("nan"))
        for row, length in enumerate(self.kv_lens):
            positions = torch.arange(length)
            blocks = self.block_table[row].long()[positions // self.block_size]
            pairs = torch.randn(length, 2, num_kv_heads, head_dim)
            cache[blocks, :, :, positions % self.block_size] = pairs
        return cache.to(dtype)


def make_sample_table(num_rows: int, vocab_size: int, seed: int) -> SampleTable:
    """Rows of every kind; each parameter is neutral or extreme now and then."""
    generator = torch.Generator().manual_seed(seed)

    def some_of(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (num_rows,), generator=generator)]

    return SampleTable(
        do_sample=some_of([1, 1, 0], torch.bool),
        seeds=torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        num_prompt_tokens=torch.randint(1, 4, (num_rows,), generator=generator),
        inv_temperature=some_of([1.4e6, 7.2, 2, 1.4427, 1.1, 0.3, 0.014], torch.float32),
        top_k=some_of([vocab_size] * 3 + [1, 3, 20, 70, 256, 257, 900, 5000], torch.int64).clamp(max=vocab_size),
        top_p=some_of([1, 1, 1e-9, 0.3, 0.8, 0.95, 0.999999], torch.float64),
        min_log2=some_of([-torch.inf] * 3 + [-99, -10, -3.3, 0], torch.float32),
    )
