"""Where the tokens of a step are in the paged cache, as every paged op takes it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

__all__ = ["PagedLayout"]


class PagedLayout(Protocol):
    """Where the tokens of a step's sequences are in the paged cache. Host lists repeat the device tensors."""

    block_table: Tensor
    """[S, B] int32."""
    query_start_loc: Tensor
    """[S + 1] int32."""
    seq_lens: Tensor
    """[S] int32: `kv_lens` on the device."""
    slot_mapping: Tensor
    """[T] int64."""
    block_size: int
    query_lens: list[int]
    """Tokens of each sequence in this step; they are the last ones of the sequence."""
    kv_lens: list[int]
    """Tokens of each sequence, this step's included."""
    paths: Tensor | None
    """[T, P] int32 where tokens are in trees, else None. Of such a token: its position p; the position r from which on
    tokens are not where their position says, which is the same for all of a sequence; then, in the order of their
    positions r to p, the places of the tokens that it follows and its own, counted in tokens from the sequence's begin;
    they may stand behind it, as in an image whose tokens all see one another.
    -1 first for tokens in no tree; all of a sequence's tokens are in a tree, or none. Only for what declares
    `OpBackend.trees`."""
    derived: dict[Any, Any]
    """What a backend worked out from the rest; kept for the other layers of the same step."""
