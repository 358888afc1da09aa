"""A bounded, numbered record of what became findable and what stopped being so."""

from __future__ import annotations

from collections import deque
from itertools import islice

from quire_interfaces import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

__all__ = ["EventLog"]


class EventLog:
    """Events in order, numbered from 0 without gaps.

    Args:
        capacity: Events kept. When more come before they are read, the oldest are lost; a reader sees it by a gap in
            the numbers, and then has to take the whole cache as unknown.
    """

    __slots__ = ("_events", "_next_number", "_next_unread")

    def __init__(self, capacity: int) -> None:
        self._events: deque[KVCacheEvent] = deque(maxlen=capacity)
        self._next_number = 0
        self._next_unread = 0

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def stored(
        self,
        block_hashes: list[bytes],
        parent_block_hash: bytes | None,
        token_ids: list[int],
        block_size: int,
        extra_keys: list[tuple[str, ...] | None],
        group: int,
        lora_name: str | None = None,
    ) -> None:
        """Record blocks that became findable, each the parent of the next."""
        self._events.append(
            BlockStored(
                sequence_number=self._number(),
                block_hashes=block_hashes,
                parent_block_hash=parent_block_hash,
                token_ids=token_ids,
                block_size=block_size,
                extra_keys=extra_keys,
                group=group,
                lora_name=lora_name,
            )
        )

    def removed(self, block_hashes: list[bytes], group: int) -> None:
        """Record blocks that are no longer findable."""
        self._events.append(BlockRemoved(sequence_number=self._number(), block_hashes=block_hashes, group=group))

    def cleared(self) -> None:
        """Record that no block is findable any more."""
        self._events.append(AllBlocksCleared(sequence_number=self._number()))

    def take(self) -> list[KVCacheEvent]:
        """Events not taken yet; they stay replayable."""
        events = self.since(self._next_unread)
        self._next_unread = self._next_number
        return events

    def since(self, sequence_number: int) -> list[KVCacheEvent]:
        """Events from this number on, as far as they are still kept."""
        first_kept = self._next_number - len(self._events)
        return list(islice(self._events, max(sequence_number - first_kept, 0), None))
