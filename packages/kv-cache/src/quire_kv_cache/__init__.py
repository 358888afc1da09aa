"""Paged KV cache bookkeeping: block pool, prefix index, hybrid groups, eviction, events.

Decides which block holds which tokens of which request. Knows integers and hashes; no tensors, no device, no scheduler.
"""

from __future__ import annotations

from quire_kv_cache.config import KVCacheConfig
from quire_kv_cache.errors import AllocatorMisuseError
from quire_kv_cache.groups import GROUP_POLICIES, GroupPolicy
from quire_kv_cache.hashing import BlockHasher, hash_blocks
from quire_kv_cache.manager import KVCacheManager, PrefixCacheStats
from quire_kv_cache.no_cache import NoKVCache
from quire_kv_cache.plan import kv_plan_of_layers, max_concurrency, plan_kv_cache, state_block_size

__version__ = "0.1.0"

__all__ = [
    "GROUP_POLICIES",
    "AllocatorMisuseError",
    "BlockHasher",
    "GroupPolicy",
    "KVCacheConfig",
    "KVCacheManager",
    "NoKVCache",
    "PrefixCacheStats",
    "hash_blocks",
    "kv_plan_of_layers",
    "max_concurrency",
    "plan_kv_cache",
    "state_block_size",
]
