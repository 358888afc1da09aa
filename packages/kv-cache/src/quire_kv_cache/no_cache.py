"""The bookkeeping of an engine whose network keeps no keys and values: every request has room, and nothing is found."""

from __future__ import annotations

import sys

from quire_interfaces import CachedPrefix, KVCacheEvent, KVCacheUsage, PrefixCacheMiss, Request

__all__ = ["NoKVCache"]


class NoKVCache:
    """Implements `quire_interfaces.BlockAllocator` for a network without KV cache groups."""

    num_groups = 0

    def max_request_tokens(self, max_step_tokens: int) -> int:
        """No bound: tokens take no memory."""
        return sys.maxsize

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Nothing."""
        return CachedPrefix(0, ())

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        cached: CachedPrefix | None = None,
        num_lookahead_tokens: int = 0,
    ) -> tuple[list[int], ...] | None:
        """Room in no group, which is always there."""
        return ()

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> int:
        """Nothing becomes findable, however many tokens are computed."""
        return sys.maxsize

    def free(self, request: Request) -> None:
        """Nothing is held."""

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """A block table for no group."""
        return ()

    def num_slots(self, request_id: str) -> int:
        """No bound: tokens take no memory."""
        return sys.maxsize

    def usage(self) -> KVCacheUsage:
        """No blocks."""
        return KVCacheUsage(num_free_blocks=0, num_total_blocks=0)

    def reset_prefix_cache(self) -> bool:
        """Nothing is cached."""
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Nothing happens."""
        return []

    def explain_miss(self, request: Request) -> PrefixCacheMiss:
        """There is no prefix cache."""
        return PrefixCacheMiss(0, "disabled", "this engine has no language model, and keeps no keys and values")
