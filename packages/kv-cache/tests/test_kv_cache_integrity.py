"""The integrity check sees each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire_interfaces import FullAttentionSpec, SlidingWindowSpec
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_testkit.conformance.block_allocator import make_request

COMMON = {"block_size": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"}


@pytest.fixture
def manager() -> KVCacheManager:
    """Two groups; request "a" runs and its window group gave a block back; free blocks of "old" are findable."""
    specs = {"0": FullAttentionSpec(**COMMON), "1": SlidingWindowSpec(**COMMON, sliding_window=4)}
    manager = KVCacheManager(plan_kv_cache(specs, num_blocks=30), KVCacheConfig(block_size=4))
    for name, first in (("old", 100), ("a", 0)):
        request = make_request(name, range(first, first + 10))
        manager.allocate(request, 8)
        request.num_computed_tokens = 8
        manager.cache_blocks(request, 8)
        manager.allocate(request, 2)
        if name == "old":
            manager.free(request)
    manager.check_integrity()
    return manager


def in_use(manager: KVCacheManager) -> int:
    return manager.block_ids("a")[0][0]


def unnamed(manager: KVCacheManager) -> int:
    return manager.block_ids("a")[0][-1]


def leak(manager: KVCacheManager) -> None:
    manager._pool.ref_counts[in_use(manager)] += 1


def double_free(manager: KVCacheManager) -> None:
    manager._pool.release([unnamed(manager)])


def break_chain(manager: KVCacheManager) -> None:
    manager._pool._previous[manager._pool._next[0]] = 3


def circle(manager: KVCacheManager) -> None:
    pool = manager._pool
    first = pool._next[0]
    pool._next[first], pool._previous[first] = first, first
    pool._previous[first] = 0


def miscount(manager: KVCacheManager) -> None:
    manager._pool.num_free += 1


def wrong_hash(manager: KVCacheManager) -> None:
    manager._pool.block_hashes[in_use(manager)] = b"other"


def lost_from_index(manager: KVCacheManager) -> None:
    block = in_use(manager)
    block_hash = manager._pool.block_hashes[block]
    assert block_hash is not None
    manager._pool.indexes[0].remove(block_hash, block)


def wrong_group(manager: KVCacheManager) -> None:
    manager._pool.block_groups[in_use(manager)] = 1


def shared_without_content(manager: KVCacheManager) -> None:
    block = unnamed(manager)
    stranger = make_request("b", range(200, 204))
    manager.allocate(stranger, 4)
    table = manager._requests["b"].tables[0]
    manager._pool.release(table)
    manager._pool.touch([block])
    table[0] = block


def table_too_short(manager: KVCacheManager) -> None:
    manager._pool.release([manager._requests["a"].tables[0].pop()])


def hole_in_table(manager: KVCacheManager) -> None:
    table = manager._requests["a"].tables[1]
    manager._pool.release([table[-1]])
    table[-1] = 0


def block_before_window(manager: KVCacheManager) -> None:
    manager._requests["a"].first_blocks[1] += 1


def null_block_used(manager: KVCacheManager) -> None:
    manager._pool.ref_counts[0] = 1


def null_block_named(manager: KVCacheManager) -> None:
    manager._pool.store(0, b"null", 0)


DAMAGE = [
    leak,
    double_free,
    break_chain,
    circle,
    miscount,
    wrong_hash,
    lost_from_index,
    wrong_group,
    shared_without_content,
    table_too_short,
    hole_in_table,
    block_before_window,
    null_block_used,
    null_block_named,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_seen(manager: KVCacheManager, damage: Callable[[KVCacheManager], None]) -> None:
    damage(manager)
    with pytest.raises(AssertionError, match=r"block|free list|group|a: "):
        manager.check_integrity()
