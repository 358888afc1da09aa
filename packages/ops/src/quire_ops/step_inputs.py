"""What goes into op `step_inputs` and what comes out. Shape legend: R rows, T tokens, S sequences of the step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["GroupInputs", "HostInts", "RowTable", "StepInputs"]


class RowTable(NamedTuple):
    """The block tables of all rows (places of running requests), for one group of layers that share them."""

    table: Tensor
    """[R, W] int32, contiguous: block ids in token order."""
    block_size: int
    sliding_window: int | None = None


class GroupInputs(NamedTuple):
    """Where a step's tokens are in the paged cache of one group of layers."""

    block_table: Tensor
    """[S, B] int32, B the most blocks that a sequence of the step needs; 0, the null block, wherever nobody may look:
    beyond a sequence's tokens, and before the sliding window of its first token."""
    slot_mapping: Tensor
    """[T] int64: block id * block_size + offset."""


class StepInputs(NamedTuple):
    """What networks get to see of a step."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    query_start_loc: Tensor
    """[S + 1] int32: first token of each sequence, then T."""
    seq_lens: Tensor
    """[S] int32: `ends` on the device."""
    groups: tuple[GroupInputs, ...]


HostInts = NDArray[np.int64]
"""Numbers that are known on the host; contiguous."""
