"""The scheduler's half of the tiers: which blocks they have, and which to write next.

Blocks are written when they have been computed, not when they are evicted: an eviction happens because somebody needs
the memory at once, and a process that ends without warning has no evictions at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_interfaces import BlockKey

__all__ = ["TierConnector", "TierIndex"]


class TierIndex(Protocol):
    """What the tiers have, as far as is known."""

    def contains(self, key: BlockKey) -> bool:
        """Whether any tier has the block."""

    def is_kept(self, key: BlockKey) -> bool:
        """Whether every tier has the block."""

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Find out which tiers have these blocks."""


class TierConnector:
    """Implements `quire_interfaces.KVConnector`.

    Args:
        index: What the tiers have.
        block_bytes: Bytes of a block, per group.
        max_store_bytes: Most bytes that wait to be written, as copies in memory; at least one block is let through.
        max_wanted: Most blocks that are remembered as still to be stored; the oldest are forgotten, which are the first
            to be evicted.
    """

    def __init__(self, index: TierIndex, block_bytes: Sequence[int], *, max_store_bytes: int, max_wanted: int) -> None:
        self._index = index
        self._block_bytes = tuple(block_bytes)
        self._max_store_bytes = max_store_bytes
        self._max_wanted = max_wanted
        self._store_queue: dict[BlockKey, None] = {}
        self._under_way: dict[BlockKey, None] = {}
        self._under_way_bytes = 0
        self._is_stopped = False

    def contains(self, key: BlockKey) -> bool:
        """Whether a tier has the block; whether it is whole is found out when it is read."""
        return not self._is_stopped and self._index.contains(key)

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Find out which of these blocks are there."""
        if not self._is_stopped:
            self._index.look_up(keys)

    def offer(self, group: int, block_hashes: Sequence[bytes]) -> None:
        """Note computed blocks."""
        if self._is_stopped:
            return
        queue = self._store_queue
        for block_hash in block_hashes:
            key = BlockKey(group, block_hash)
            if key not in self._under_way:
                queue[key] = None
        while len(queue) > self._max_wanted:
            del queue[next(iter(queue))]

    @property
    def has_stores(self) -> bool:
        """Whether blocks wait to be stored."""
        return bool(self._store_queue)

    def take_stores(self, max_blocks: int) -> list[BlockKey]:
        """Blocks to store with the next step, oldest first."""
        keys: list[BlockKey] = []
        while self._store_queue and len(keys) < max_blocks:
            key = next(iter(self._store_queue))
            num_bytes = self._block_bytes[key.group]
            if self._under_way and self._under_way_bytes + num_bytes > self._max_store_bytes:
                break
            del self._store_queue[key]
            if self._index.is_kept(key):
                continue
            keys.append(key)
            self._under_way[key] = None
            self._under_way_bytes += num_bytes
        return keys

    def stored(self, keys: Sequence[BlockKey], arrived: Sequence[bool]) -> None:
        """These are no longer under way, written or not."""
        for key, _ in zip(keys, arrived, strict=True):
            del self._under_way[key]
            self._under_way_bytes -= self._block_bytes[key.group]

    def stop(self) -> None:
        """The worker gave up."""
        self._is_stopped = True
        self._store_queue.clear()
