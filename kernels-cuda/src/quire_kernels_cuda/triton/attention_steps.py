"""What attention launches depend on of a step: which sequences have few tokens in it, how keys are divided.

Sequences with few tokens in the step (decodes, and drafts that are verified) share one launch, in which each has one
tile and its keys may be divided among several programs; the others (prompts and pieces of them) share another. Knows
counts and lengths; does not know what is attended to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire_interfaces import FEW_TOKENS
from quire_kernels_cuda.platform import num_multiprocessors
from quire_ops import PagedLayout

__all__ = ["MAX_SPLITS", "MIN_TILE", "Lengths", "arrival_counts", "lengths_of", "meta_layout", "num_splits", "padded"]

MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
"""Programs that a decode launch should have for each multiprocessor, so that loads of some hide behind others."""
PROCESSORS = {"cpu": 8, "meta": 128}
"""Multiprocessors where there is no GPU to ask."""
MIN_TILE = 16
"""The least that a matrix product takes of any dimension."""


class Lengths(NamedTuple):
    """What launches of a step depend on."""

    most_of_few: int
    """Most tokens that a sequence of few tokens has in the step; 0 if there is none."""
    has_many: bool
    """Whether a sequence has many."""
    longest: int
    """Keys of the longest sequence."""


def lengths_of(layout: PagedLayout) -> Lengths:
    """Worked out for the first layer of a step."""
    lengths: Lengths | None = layout.derived.get("triton")
    if lengths is None:
        few = [query_len for query_len in layout.query_lens if query_len <= FEW_TOKENS]
        has_many = len(few) < len(layout.query_lens)
        lengths = Lengths(max(few, default=0), has_many, max(layout.kv_lens, default=0))
        layout.derived["triton"] = lengths
    return lengths


def arrival_counts(layout: PagedLayout, num_kv_heads: int) -> Tensor:
    """[S, num_kv_heads] int32 zeros, in which programs that share a sequence's keys count how many have ended; a launch
    leaves zeros. Of the step alone, and of its graph: launches of other steps, which may run beside it, have others."""
    key = ("triton arrived", num_kv_heads)
    counts: Tensor | None = layout.derived.get(key)
    if counts is None:
        size = len(layout.query_lens), num_kv_heads
        counts = layout.derived[key] = torch.zeros(size, dtype=torch.int32, device=layout.seq_lens.device)
    return counts


def num_splits(device: torch.device, programs: int, longest: int, keys_per_step: int) -> int:
    """Programs that share a sequence's keys: a power of two, from counts that the host has.

    Args:
        programs: What a launch has without splits.
        longest: Keys of the longest sequence.
    """
    processors = PROCESSORS.get(device.type) or num_multiprocessors(device)
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // max(programs, 1), MAX_SPLITS, -(-longest // keys_per_step))
    return 1 << max(wanted, 1).bit_length() - 1


def padded(size: int) -> int:
    """A dimension as matrix products take it."""
    return max(MIN_TILE, int(triton.next_power_of_2(size)))


def meta_layout(num_seqs: int, query_len: int, kv_len: int, block_size: int) -> PagedLayout:
    """A layout of sequences of the same lengths, whose tensors have shapes and no memory."""

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    return PagedLayout(
        query_start_loc=empty(num_seqs + 1),
        seq_lens=empty(num_seqs),
        block_table=empty(num_seqs, -(-kv_len // block_size)),
        slot_mapping=empty(num_seqs * query_len, dtype=torch.int64),
        block_size=block_size,
        query_lens=[query_len] * num_seqs,
        kv_lens=[kv_len] * num_seqs,
    )
