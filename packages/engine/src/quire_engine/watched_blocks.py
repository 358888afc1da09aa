"""`BlockMap`: who holds which block of the KV cache, as changes. Hears what is taken and given back; knows no step."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice

from quire_interfaces import NULL_BLOCK_ID
from quire_interfaces.engine_watch import BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, WatchedKVCache

__all__ = ["BlockMap"]

MAX_CHANGES = 1 << 16
"""Changes kept; whoever has read fewer than came since gets the whole map anew."""
CHECKED_BLOCKS = 256
"""Blocks compared with the cache for each report, in turn: what no step tells (a window that moved on, a cache that was
reset) is seen by that."""
_OF_STATE = (BLOCK_FREE, BLOCK_CACHED, BLOCK_SHARED)


class BlockMap:
    """Holders of all blocks (see `quire_interfaces.engine_watch`).

    Args:
        kv_cache: Asked at the beginning, and about blocks that a request gives back.
    """

    def __init__(self, kv_cache: WatchedKVCache) -> None:
        self._kv_cache = kv_cache
        self.num_blocks = kv_cache.usage().num_total_blocks
        states = kv_cache.block_states(range(1, self.num_blocks + 1)) if self.num_blocks else b""
        self._holders = array("q", [BLOCK_FREE, *(_OF_STATE[state] for state in states)])
        self._changes: deque[tuple[int, int]] = deque(maxlen=MAX_CHANGES)
        self.num_changes = 0
        self._next_checked = 1

    def _set(self, block_id: int, holder: int) -> None:
        if self._holders[block_id] != holder:
            self._holders[block_id] = holder
            self._changes.append((block_id, holder))
            self.num_changes += 1

    def take(self, number: int, block_ids: Sequence[int], num_prefix_blocks: int = 0) -> None:
        """A request got blocks, the first ones of which hold a cached prefix."""
        for index, block_id in enumerate(block_ids):
            if block_id == NULL_BLOCK_ID:
                continue
            if index >= num_prefix_blocks:
                self._set(block_id, number)
            elif self._holders[block_id] in (BLOCK_FREE, BLOCK_CACHED):
                self._set(block_id, -number)
            elif abs(self._holders[block_id]) != number:
                self._set(block_id, BLOCK_SHARED)

    def grow(self, number: int, block_ids: Sequence[int]) -> None:
        """A request got further blocks, for tokens that it computes."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK_ID:
                self._holders[block_id] = number
                self._changes.append((block_id, number))
                self.num_changes += 1

    def release(self, number: int, block_ids: Sequence[int]) -> None:
        """A request gave its blocks back; to be told before who took them in the same step."""
        held = [block_id for block_id in block_ids if block_id != NULL_BLOCK_ID]
        for block_id, state in zip(held, self._kv_cache.block_states(held), strict=True):
            holder = self._holders[block_id]
            if _OF_STATE[state] != BLOCK_SHARED:
                self._set(block_id, _OF_STATE[state])
            elif abs(holder) == number:  # nobody shared it: it was taken again at once
                self._set(block_id, BLOCK_CACHED)

    def check(self) -> None:
        """Compare some blocks with the cache, others than the last time."""
        first = self._next_checked
        end = min(first + CHECKED_BLOCKS, self.num_blocks + 1)
        for block_id, state in enumerate(self._kv_cache.block_states(range(first, end)), first):
            is_held = self._holders[block_id] not in (BLOCK_FREE, BLOCK_CACHED)
            if _OF_STATE[state] != BLOCK_SHARED or not is_held:
                self._set(block_id, _OF_STATE[state])
        self._next_checked = end if end <= self.num_blocks else 1

    def holders(self) -> list[int]:
        """Of each block, the null block left out."""
        return self._holders[1:].tolist()

    def since(self, number: int) -> list[tuple[int, int]] | None:
        """(block, holder) of the changes from this number on; None where they are not kept any more."""
        first_kept = self.num_changes - len(self._changes)
        if not first_kept <= number <= self.num_changes:
            return None
        return list(islice(self._changes, number - first_kept, None))
