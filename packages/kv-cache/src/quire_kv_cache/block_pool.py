"""The blocks themselves: who is free, how often each is referenced, which content each holds.

Free blocks form a doubly linked list, least recently used first, whose links live in two integer lists, so that a block
found by its hash can leave the middle of the list in constant time. Block 0, the null block, is the list's sentinel: it
is never handed out. State is kept in parallel lists of integers rather than block objects: a cache of a million blocks
then gives the garbage collector nothing to walk.

The pool knows no requests and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quire_interfaces import NULL_BLOCK_ID, ConfigError
from quire_kv_cache.prefix_index import PrefixIndex

__all__ = ["BlockPool"]

_NOT_FREE = -1


class BlockPool:
    """Blocks 1 to num_blocks - 1, shared by all groups.

    Args:
        num_blocks: Blocks in the tensors, the null block included.
        num_groups: KV cache groups; each has its own prefix index, as equal tokens have other KV in other layers.
        on_evict: Called with (group, hashes) when hashes stop being findable because their blocks were taken.
    """

    __slots__ = ("_next", "_on_evict", "_previous", "block_groups", "block_hashes", "indexes", "num_free", "ref_counts")

    def __init__(self, num_blocks: int, num_groups: int, on_evict: Callable[[int, list[bytes]], None]) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (block 0 is never handed out), got {num_blocks}", field="num_blocks"
            )
        self._next = [*range(1, num_blocks), NULL_BLOCK_ID]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self.block_groups = [0] * num_blocks
        """Meaningful for blocks with a hash."""
        self.indexes = [PrefixIndex() for _ in range(num_groups)]
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return len(self.ref_counts)

    def take(self, count: int) -> list[int]:
        """Hand out the `count` least recently used free blocks, each with one reference; their contents are forgotten.

        The caller has checked that `count <= num_free`.
        """
        if count == 0:
            return []
        following, previous, hashes = self._next, self._previous, self.block_hashes
        block = following[NULL_BLOCK_ID]
        block_ids = []
        evicted = []
        for _ in range(count):
            block_ids.append(block)
            if hashes[block] is not None:
                evicted.append(block)
            after = following[block]
            following[block] = previous[block] = _NOT_FREE
            self.ref_counts[block] = 1
            block = after
        following[NULL_BLOCK_ID] = block
        previous[block] = NULL_BLOCK_ID
        self.num_free -= count
        if evicted:
            self._forget(evicted)
        return block_ids

    def _forget(self, block_ids: list[int]) -> None:
        gone: dict[int, list[bytes]] = {}
        for block in block_ids:
            block_hash = self.block_hashes[block]
            assert block_hash is not None
            group = self.block_groups[block]
            self.block_hashes[block] = None
            if self.indexes[group].remove(block_hash, block):
                gone.setdefault(group, []).append(block_hash)
        for group, hashes in gone.items():
            self._on_evict(group, hashes)

    def forget(self, contents: Mapping[int, bytes]) -> None:
        """Let go of contents (block -> its hash): those of free blocks that still hold them. These are taken next."""
        gone = [block for block, each in contents.items() if self.block_hashes[block] == each]
        gone = [block for block in gone if not self.ref_counts[block]]
        self.touch(gone)
        self._forget(gone)
        self.release(gone)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; a free one leaves the free list, content kept. Null blocks are skipped."""
        following, previous, ref_counts = self._next, self._previous, self.ref_counts
        for block in block_ids:
            if block == NULL_BLOCK_ID:
                continue
            if ref_counts[block] == 0:
                before, after = previous[block], following[block]
                following[before] = after
                previous[after] = before
                following[block] = previous[block] = _NOT_FREE
                self.num_free -= 1
            ref_counts[block] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block, in this order. Null blocks are skipped.

        A block without references becomes free: the next to be taken when nobody can find its content, else the last.
        """
        following, previous, ref_counts = self._next, self._previous, self.ref_counts
        for block in block_ids:
            if block == NULL_BLOCK_ID:
                continue
            ref_counts[block] -= 1
            if ref_counts[block]:
                continue
            before = NULL_BLOCK_ID if self.block_hashes[block] is None else previous[NULL_BLOCK_ID]
            after = following[before]
            following[before] = previous[after] = block
            previous[block], following[block] = before, after
            self.num_free += 1

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free now."""
        ref_counts = self.ref_counts
        return sum(1 for block in block_ids if block != NULL_BLOCK_ID and ref_counts[block] == 0)

    def num_released_by(self, block_ids: Iterable[int]) -> int:
        """How many blocks `release` would make free."""
        ref_counts = self.ref_counts
        return sum(1 for block in block_ids if block != NULL_BLOCK_ID and ref_counts[block] == 1)

    def store(self, block_id: int, block_hash: bytes, group: int) -> bool:
        """Make a block findable under its content. True when this content was not findable in the group before."""
        self.block_hashes[block_id] = block_hash
        self.block_groups[block_id] = group
        return self.indexes[group].insert(block_hash, block_id)

    def clear_index(self) -> None:
        """Forget all contents (no block is in use)."""
        for index in self.indexes:
            index.clear()
        self.block_hashes = [None] * len(self.block_hashes)

    def free_block_ids(self) -> list[int]:
        """The free list, next to be taken first (slow: for checks).

        Raises:
            AssertionError: the links do not form one chain.
        """
        ids = []
        before, block = NULL_BLOCK_ID, self._next[NULL_BLOCK_ID]
        while block != NULL_BLOCK_ID:
            assert self._previous[block] == before, f"free list: block {block} does not point back to {before}"
            ids.append(block)
            assert len(ids) < self.num_blocks, "free list: runs in a circle"
            before, block = block, self._next[block]
        assert self._previous[NULL_BLOCK_ID] == before, f"free list: the tail is not {before}"
        return ids
