"""Events: numbers, runs, replay, the bound."""

from __future__ import annotations

import pytest

from quire_interfaces import BlockRemoved, BlockStored, FullAttentionSpec, SlidingWindowSpec
from quire_kv_cache import KVCacheConfig, KVCacheManager, hash_blocks, plan_kv_cache
from quire_testkit.conformance.block_allocator import make_request

COMMON = {"block_size": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"}


def make_manager(*windows: int | None, num_usable: int = 8, buffer_size: int = 100) -> KVCacheManager:
    specs = {
        str(i): FullAttentionSpec(**COMMON) if window is None else SlidingWindowSpec(**COMMON, sliding_window=window)
        for i, window in enumerate(windows or (None,))
    }
    config = KVCacheConfig(block_size=4, enable_kv_cache_events=True, kv_cache_event_buffer_size=buffer_size)
    return KVCacheManager(plan_kv_cache(specs, num_blocks=num_usable + 1), config)


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    request = make_request(name, tokens)
    cached = manager.find_cached_prefix(request)
    assert manager.allocate(request, len(tokens) - cached.num_tokens, cached) is not None
    manager.cache_blocks(request, len(tokens))
    manager.free(request)


def test_a_continuation_names_its_parent() -> None:
    manager = make_manager()
    run(manager, "a", list(range(8)))
    run(manager, "b", list(range(13)))
    first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    hashes = hash_blocks(range(12), 4)
    assert first.block_hashes == hashes[:2]
    assert second.block_hashes == hashes[2:]
    assert second.parent_block_hash == hashes[1]
    assert second.token_ids == [8, 9, 10, 11]
    assert second.extra_keys == [None]


def test_extra_keys_are_per_block() -> None:
    manager = make_manager()
    keys = ((2, 5, "cat"), (4, 6, "dog"), (9, 12, "cow"))
    request = make_request("a", range(16), cache_salt="salt", cache_extra_keys=keys)
    manager.allocate(request, 16)
    manager.cache_blocks(request, 16)
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [("cat", "salt"), ("cat", "dog"), ("cow",), None]


def test_content_that_is_findable_already_is_not_told_again() -> None:
    manager = make_manager(num_usable=20)
    requests = [make_request(name, tokens) for name, tokens in (("a", range(12)), ("b", range(16)))]
    for request in requests:
        manager.allocate(request, request.num_tokens)
    for request in requests:
        manager.cache_blocks(request, request.num_tokens)
    first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert len(first.block_hashes) == 3
    assert second.block_hashes == requests[1].block_hashes[3:]
    for request in requests:
        manager.free(request)
    assert manager.allocate(make_request("c", range(100, 180)), 80) is not None
    (removed,) = manager.take_events()
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(requests[1].block_hashes)


def test_gaps_split_a_run() -> None:
    manager = make_manager(num_usable=4)
    run(manager, "a", list(range(16)))
    hashes = hash_blocks(range(16), 4)
    # Evict blocks 2 and 3, then compute all anew beside the old 0 and 1, and find that only 2 and 3 are news.
    keeper = make_request("keeper", range(100, 108))
    manager.allocate(keeper, 8)
    manager.free(keeper)
    manager.take_events()
    request = make_request("b", range(16), reads_prefix_cache=False)
    manager.allocate(request, 8)
    manager.cache_blocks(request, 8)
    assert manager.take_events() == []
    request.num_computed_tokens = 8
    manager.allocate(request, 8)
    manager.cache_blocks(request, 16)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == hashes[2:]
    assert stored.parent_block_hash == hashes[1]


def test_news_on_both_sides_of_known_content_are_two_events() -> None:
    manager = make_manager(6, num_usable=12)
    run(manager, "a", list(range(16)))
    hashes = hash_blocks(range(16), 4)
    # A hit of the window group after block 2 needs block 1 and 2 only: make 0 and 3 unfindable, then compute anew.
    manager.take_events()
    pool = manager._pool
    for i in (0, 3):
        block = pool.indexes[0].blocks[hashes[i]]
        pool.indexes[0].remove(hashes[i], block)
        pool.block_hashes[block] = None
    request = make_request("b", range(16), reads_prefix_cache=False)
    manager.allocate(request, 16)
    manager.cache_blocks(request, 16)
    first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, first.token_ids, first.parent_block_hash) == (hashes[:1], [0, 1, 2, 3], None)
    assert (second.block_hashes, second.token_ids, second.parent_block_hash) == (
        hashes[3:],
        [12, 13, 14, 15],
        hashes[2],
    )


def test_groups_are_told_apart() -> None:
    manager = make_manager(None, 6)
    run(manager, "a", list(range(8)))
    assert [event.group for event in manager.take_events() if isinstance(event, BlockStored)] == [0, 1]
    manager.allocate(make_request("b", range(100, 116)), 16)
    removed = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert sorted(event.group for event in removed) == [0, 1]


def test_replay() -> None:
    manager = make_manager()
    run(manager, "a", list(range(8)))
    taken = manager.take_events()
    assert manager.take_events() == []
    run(manager, "b", list(range(100, 108)))
    assert manager.events_since(0)[:1] == taken
    assert [event.sequence_number for event in manager.events_since(0)] == [0, 1]
    assert manager.events_since(1) == manager.take_events()
    assert manager.events_since(2) == []
    assert manager.events_since(0)[:1] == taken


@pytest.mark.parametrize("take_between", [False, True])
def test_the_buffer_is_bounded_and_gaps_show(take_between: bool) -> None:
    manager = make_manager(buffer_size=3)
    for i in range(10):
        assert manager.reset_prefix_cache()
        if take_between:
            (event,) = manager.take_events()
            assert event.sequence_number == i
    assert [event.sequence_number for event in manager.events_since(0)] == [7, 8, 9]
    expected = [] if take_between else [7, 8, 9]
    assert [event.sequence_number for event in manager.take_events()] == expected
