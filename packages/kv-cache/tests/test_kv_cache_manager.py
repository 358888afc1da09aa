"""What the manager promises beyond the contract: refusal of misuse, rollback, statistics, exact release."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import (
    NULL_BLOCK_ID,
    CachedPrefix,
    ConfigError,
    FullAttentionSpec,
    KVCachePlan,
    KVCacheSpec,
    RequestError,
    SlidingWindowSpec,
)
from quire_kv_cache import AllocatorMisuseError, KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_testkit.conformance.block_allocator import make_request


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="bfloat16")


def sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16", sliding_window=window)


def make_manager(*specs: KVCacheSpec, num_usable: int = 20, **options: bool) -> KVCacheManager:
    layers = {f"layers.{i}": spec for i, spec in enumerate(specs or (full(),))}
    plan = plan_kv_cache(layers, num_blocks=num_usable + 1)
    return KVCacheManager(plan, KVCacheConfig(block_size=4, **options))


def test_plan_and_settings_must_agree() -> None:
    plan = plan_kv_cache({"a": full(8)}, num_blocks=10)
    with pytest.raises(ConfigError, match="block_size is 16, but the plan was made for 8"):
        KVCacheManager(plan)
    with pytest.raises(ConfigError, match="no KV cache groups"):
        KVCacheManager(KVCachePlan(groups=(), num_blocks=10, tensor_block_bytes=()))


def test_a_stale_prefix_is_refused() -> None:
    manager = make_manager(num_usable=4)
    old = make_request("old", range(16))
    manager.allocate(old, 16)
    manager.cache_blocks(old, 16)
    manager.free(old)
    request = make_request("a", range(16))
    cached = manager.find_cached_prefix(request)
    assert cached.num_tokens == 12
    other = make_request("other", range(100, 116))
    manager.allocate(other, 16)
    manager.cache_blocks(other, 16)
    manager.free(other)
    with pytest.raises(AllocatorMisuseError, match="stale"):
        manager.allocate(request, 4, cached)
    assert manager.num_slots("a") == 0
    assert manager.usage().num_free_blocks == 4
    manager.check_integrity()


def test_a_prefix_of_another_request_is_refused() -> None:
    manager = make_manager()
    old = make_request("old", range(9))
    manager.allocate(old, 9)
    manager.cache_blocks(old, 9)
    cached = manager.find_cached_prefix(make_request("new", range(9)))
    other = make_request("other", range(50, 60))
    manager.find_cached_prefix(other)
    with pytest.raises(AllocatorMisuseError, match="stale"):
        manager.allocate(other, 2, cached)


def test_a_prefix_is_for_the_first_allocation() -> None:
    manager = make_manager()
    request = make_request("a", range(9))
    manager.allocate(request, 9)
    manager.cache_blocks(request, 9)
    cached = manager.find_cached_prefix(make_request("new", range(9)))
    request.num_computed_tokens = 9
    with pytest.raises(AllocatorMisuseError, match="already holds"):
        manager.allocate(request, 1, cached)
    assert manager.allocate(request, 1, CachedPrefix(0, ([],))) == ([],)


@pytest.mark.parametrize(("num_new", "num_lookahead"), [(-1, 0), (1, -1)])
def test_negative_counts_are_refused(num_new: int, num_lookahead: int) -> None:
    manager = make_manager()
    with pytest.raises(AllocatorMisuseError, match="negative"):
        manager.allocate(make_request("a", range(9)), num_new, None, num_lookahead)


def test_unknown_tokens_cannot_be_cached() -> None:
    manager = make_manager()
    request = make_request("a", range(7))
    manager.allocate(request, 7, None, 8)
    manager.cache_blocks(request, 7)
    with pytest.raises(AllocatorMisuseError, match="7 are known"):
        manager.cache_blocks(request, 8)
    request.output_token_ids.append(7)
    manager.cache_blocks(request, 8)
    request.output_token_ids.extend(range(8, 30))
    with pytest.raises(AllocatorMisuseError, match="16 fit"):
        manager.cache_blocks(request, 17)
    manager.check_integrity()


def test_caching_for_a_stranger_does_nothing() -> None:
    manager = make_manager()
    manager.cache_blocks(make_request("gone", range(9)), 9)
    assert manager.find_cached_prefix(make_request("a", range(9))).num_tokens == 0


def test_bad_tokens_leave_no_trace() -> None:
    manager = make_manager()
    request = make_request("a", [1, 2, -3, 4, 5])
    with pytest.raises(RequestError, match="-3"):
        manager.find_cached_prefix(request)
    assert manager.usage() == (20, 20)


def test_block_tables_are_the_callers_own() -> None:
    manager = make_manager()
    request = make_request("a", range(9))
    blocks = manager.allocate(request, 9)
    assert blocks is not None
    blocks[0].append(77)
    manager.block_ids("a")[0].clear()
    assert len(manager.block_ids("a")[0]) == 3
    request.num_computed_tokens = 9
    first, second = manager.allocate(request, 1), manager.allocate(request, 1)
    assert first == second == ([],)
    assert first is not None
    assert second is not None
    assert first[0] is not second[0]
    with pytest.raises(KeyError):
        manager.block_ids("stranger")


def test_rejected_drafts_reuse_their_slots() -> None:
    manager = make_manager()
    request = make_request("a", range(7))
    manager.allocate(request, 7)
    request.num_computed_tokens = 7
    request.output_token_ids.append(7)
    assert manager.allocate(request, 4) is not None
    table = manager.block_ids("a")
    request.num_computed_tokens = 11 - 3
    manager.cache_blocks(request, 8)
    request.output_token_ids.append(90)
    assert manager.allocate(request, 4) == ([],)
    assert manager.block_ids("a") == table
    manager.check_integrity()


def test_drafts_in_flight_do_not_cost_the_window() -> None:
    manager = make_manager(sliding(4))
    request = make_request("a", range(8))
    manager.allocate(request, 8)
    request.num_computed_tokens = 8
    request.output_token_ids.append(8)
    assert manager.allocate(request, 7) is not None
    request.num_computed_tokens += 7
    # Token 8 and six drafts are in flight. If all drafts are rejected, the next token is 9 and reads 6 to 8.
    assert manager.allocate(request, 1) is not None
    assert manager.block_ids("a")[0][0] == NULL_BLOCK_ID
    assert manager.block_ids("a")[0][1] != NULL_BLOCK_ID


def test_windows_are_given_back_at_once() -> None:
    manager = make_manager(sliding(6))
    request = make_request("a", range(4))
    manager.allocate(request, 4, None, 60)
    request.num_computed_tokens = 4
    for position in range(4, 60):
        request.output_token_ids.append(position)
        request.num_computed_tokens = position
        assert manager.allocate(request, 1) is not None
        assert manager.block_ids("a")[0].count(NULL_BLOCK_ID) == max(position - 5, 0) // 4
        manager.check_integrity()


def test_a_long_prefill_in_chunks_holds_only_its_window() -> None:
    manager = make_manager(sliding(8), num_usable=6)
    request = make_request("a", range(400))
    while request.num_computed_tokens < 400:
        assert manager.allocate(request, 8) is not None
        request.num_computed_tokens += 8
        manager.cache_blocks(request, request.num_computed_tokens)
        manager.check_integrity()
    assert len(manager.block_ids("a")[0]) == 100


def test_what_leaves_the_window_before_it_was_cached_is_not_findable() -> None:
    manager = make_manager(full(), sliding(4))
    request = make_request("a", range(16))
    manager.allocate(request, 12)
    request.num_computed_tokens = 12
    manager.allocate(request, 4)
    manager.cache_blocks(request, 16)
    manager.check_integrity()
    # Block 0 and 1 of the window group were given back unnamed; block 2 and 3 serve hits of 12 and 16 tokens.
    assert manager.find_cached_prefix(make_request("b", range(17))).num_tokens == 16
    assert manager.find_cached_prefix(make_request("b", range(13))).num_tokens == 12
    assert manager.find_cached_prefix(make_request("b", range(12))).num_tokens == 0


def test_room_that_a_window_gives_back_counts() -> None:
    manager = make_manager(sliding(2), num_usable=2)
    request = make_request("a", range(8))
    manager.allocate(request, 8)
    request.num_computed_tokens = 8
    request.output_token_ids.append(8)
    assert manager.usage().num_free_blocks == 0
    assert manager.allocate(request, 1) is not None
    assert manager.usage().num_free_blocks == 0
    manager.check_integrity()


def test_equal_prompts_computed_side_by_side_outlive_each_other() -> None:
    manager = make_manager(num_usable=6)
    twins = [make_request(name, range(8)) for name in "ab"]
    for request in twins:
        manager.allocate(request, 8, manager.find_cached_prefix(request))
    for request in twins:
        manager.cache_blocks(request, 8)
    manager.check_integrity()
    manager.free(twins[0])
    assert manager.allocate(make_request("c", range(50, 66)), 16) is not None
    manager.check_integrity()
    assert manager.find_cached_prefix(make_request("d", range(9))).num_tokens == 8


def test_statistics() -> None:
    manager = make_manager(num_usable=4)
    request = make_request("a", range(10))
    manager.allocate(request, 10, manager.find_cached_prefix(request))
    assert request.num_cached_tokens == 0
    manager.cache_blocks(request, 10)
    manager.free(request)
    request.num_preemptions = 1
    manager.allocate(request, 2, manager.find_cached_prefix(request))
    manager.free(request)
    assert manager.prefix_cache_stats == (1, 10, 0, 0)
    assert request.num_cached_tokens == 0
    again = make_request("b", range(11))
    manager.find_cached_prefix(again)
    manager.allocate(again, 3, manager.find_cached_prefix(again))
    assert again.num_cached_tokens == 8
    assert manager.prefix_cache_stats == (2, 21, 8, 0)
    manager.free(again)
    manager.allocate(make_request("c", range(50, 66)), 16)
    assert manager.prefix_cache_stats == (3, 37, 8, 2)


def test_statistics_leave_out_who_cannot_hit() -> None:
    for manager, reads in ((make_manager(enable_prefix_caching=False), True), (make_manager(), False)):
        request = make_request("a", range(10), reads_prefix_cache=reads)
        manager.allocate(request, 10, manager.find_cached_prefix(request))
        assert manager.prefix_cache_stats == (0, 0, 0, 0)


def test_longest_request_of_full_attention() -> None:
    manager = make_manager(num_usable=5)
    assert manager.max_request_tokens(1) == manager.max_request_tokens(1000) == 20
    assert make_manager(full(), sliding(100), num_usable=5).max_request_tokens(1) == 8
    with pytest.raises(AllocatorMisuseError, match="max_step_tokens=0"):
        manager.max_request_tokens(0)


def test_windows_alone_bound_no_request() -> None:
    assert make_manager(sliding(8), num_usable=4).max_request_tokens(6) == sys.maxsize
    # 7 tokens before the step's own: 13 in a row touch at most four blocks, 14 can touch five.
    assert make_manager(sliding(8), num_usable=4).max_request_tokens(7) == 16


@settings(deadline=None, max_examples=50)
@given(window=st.integers(1, 12), num_usable=st.integers(2, 12), step=st.integers(1, 12), with_full=st.booleans())
def test_the_longest_request_runs(window: int, num_usable: int, step: int, with_full: bool) -> None:
    manager = make_manager(*([full()] if with_full else []), sliding(window), num_usable=num_usable)
    length = min(manager.max_request_tokens(step), 200)
    request = make_request("a", range(length))
    while request.num_computed_tokens < length:
        num_new = min(step, length - request.num_computed_tokens)
        assert manager.allocate(request, num_new) is not None
        request.num_computed_tokens += num_new
        manager.cache_blocks(request, request.num_computed_tokens)


def test_lookups_switched_off_hash_nothing() -> None:
    manager = make_manager(enable_prefix_caching=False)
    request = make_request("a", range(10))
    manager.allocate(request, 10, manager.find_cached_prefix(request))
    manager.cache_blocks(request, 10)
    assert request.block_hashes == []
    manager.free(request)
    manager.check_integrity()
