"""Where the tokens of a step are in the paged cache, as every paged op takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire_ops.replay import StateReplay

__all__ = ["PagedLayout"]


@dataclass(slots=True, kw_only=True)
class PagedLayout:
    """Where the keys and values, or the states, of a step's tokens are in one paged cache.

    Tokens of a sequence stand next to each other. Host lists repeat what the scheduler already knew, so that no backend
    has to read a device tensor back. Shape legend: T tokens of the step, S sequences of the step, B blocks in the
    widest block table, P numbers that describe a path.
    """

    query_start_loc: Tensor
    """[S + 1] int32: first token of each sequence in this step, then T."""
    seq_lens: Tensor
    """[S] int32: `kv_lens` on the device."""
    block_table: Tensor
    """[S, B] int32: block ids in token order; entries past the sequence are 0, the null block."""
    slot_mapping: Tensor
    """[T] int64: slot of each token, block id * block_size + offset."""
    block_size: int
    query_lens: list[int]
    """Tokens of each sequence in this step; they are the last ones of the sequence."""
    kv_lens: list[int]
    """Tokens of each sequence, this step's included."""
    paths: Tensor | None = None
    """[T, P] int32 where tokens are in trees, else None. Of such a token: its position p; the position r from which on
    tokens are not where their position says, which is the same for all of a sequence; then, in the order of their
    positions r to p, the places of the tokens that it follows and its own, counted in tokens from the sequence's begin;
    they may stand behind it, as in an image whose tokens all see one another.
    -1 first for tokens in no tree; all of a sequence's tokens are in a tree, or none. Only for what declares
    `OpBackend.trees`."""
    paths_have_windows: bool = False
    """`paths` name exactly the tokens that each one sees, so that layers with a sliding window pass none to their
    backend."""
    replay: StateReplay | None = None
    """Of a group of states, where tokens of the step may turn out wrong: takes down what is needed to store the states
    that go on once it is known."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """What a backend worked out from the fields above, for the other layers of this step. A backend fills it on first
    use; whoever changes the layout in place empties it."""
