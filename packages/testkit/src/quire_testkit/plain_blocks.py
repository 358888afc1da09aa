"""A second, plain implementation of `BlockAllocator`: it counts out blocks and remembers no prefixes.

For tests that need an allocator but must not depend on the real one, and as a check that a scheduler asks for nothing
beyond the Protocol.
"""

from __future__ import annotations

from quire_interfaces import (
    CachedPrefix,
    KVCacheEvent,
    KVCacheUsage,
    PrefixCacheMiss,
    Request,
)

__all__ = ["PlainBlocks"]


class PlainBlocks:
    """One group of full attention, no prefix cache.

    Args:
        num_usable_blocks: Blocks without the null block; ids 1 to num_usable_blocks.
        block_size: Token slots per block.
    """

    num_groups = 1

    def __init__(self, num_usable_blocks: int, block_size: int) -> None:
        self._total = num_usable_blocks
        self._block_size = block_size
        self._free = list(range(num_usable_blocks, 0, -1))
        self._tables: dict[str, list[int]] = {}

    def max_request_tokens(self, max_step_tokens: int) -> int:
        """All slots."""
        return self._total * self._block_size

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Always nothing."""
        return CachedPrefix(0, ([],))

    def allocate(
        self, request: Request, num_new_tokens: int, cached: CachedPrefix | None = None, num_lookahead_tokens: int = 0
    ) -> tuple[list[int], ...] | None:
        """Append blocks until the tokens fit."""
        held = self._tables.get(request.request_id, [])
        end = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        missing = max(0, -(-end // self._block_size) - len(held))
        if missing > len(self._free):
            return None
        new = [self._free.pop() for _ in range(missing)]
        self._tables[request.request_id] = held + new
        return (new,)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> int:
        """Checks the promise on the arguments, of every call; remembers nothing."""
        assert num_computed_tokens <= request.num_tokens, "unknown tokens cannot be remembered"
        assert num_computed_tokens <= self.num_slots(request.request_id), "these tokens have no slots"
        return num_computed_tokens + 1

    def free(self, request: Request) -> None:
        """Put the request's blocks back."""
        self._free.extend(reversed(self._tables.pop(request.request_id, [])))

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Its block table."""
        return (list(self._tables[request_id]),)

    def num_slots(self, request_id: str) -> int:
        """Slots of its blocks."""
        return len(self._tables.get(request_id, ())) * self._block_size

    def usage(self) -> KVCacheUsage:
        """Free and total blocks."""
        return KVCacheUsage(len(self._free), self._total)

    def reset_prefix_cache(self) -> bool:
        """There is nothing to forget, but the promise is kept."""
        return not self._tables

    def take_events(self) -> list[KVCacheEvent]:
        """None ever."""
        return []

    def explain_miss(self, request: Request) -> PrefixCacheMiss:
        """Prefix caching is off."""
        return PrefixCacheMiss(0, "disabled", "this allocator remembers no prefixes")
