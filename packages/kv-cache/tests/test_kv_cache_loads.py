"""Prefixes that a tier continues: what is to be loaded, who holds it meanwhile, and what is findable afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire_interfaces import BlockKey, BlockStored, FullAttentionSpec, KVCacheSpec, Request, SlidingWindowSpec
from quire_kv_cache import AllocatorMisuseError, KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_testkit.conformance.block_allocator import make_request

SIZE = 4
SHAPE = {"block_size": SIZE, "num_kv_heads": 1, "head_dim": 1, "dtype": "bfloat16"}


def make_cache(num_blocks: int = 20, window: int | None = None, **options: object) -> KVCacheManager:
    specs: dict[str, KVCacheSpec] = {"full": FullAttentionSpec(**SHAPE)}
    if window is not None:
        specs["sliding"] = SlidingWindowSpec(**SHAPE, sliding_window=window)
    on_computed = options.pop("on_computed", None)
    config = KVCacheConfig(block_size=SIZE, **options)
    return KVCacheManager(plan_kv_cache(specs, num_blocks=num_blocks + 1), config, on_computed=on_computed)  # type: ignore[arg-type]


def has_all(key: BlockKey) -> bool:
    return True


def has_none(key: BlockKey) -> bool:
    return False


def compute(cache: KVCacheManager, request: Request) -> None:
    """Serve a request and let it end; its blocks stay cached."""
    cached = cache.find_cached_prefix(request)
    assert cache.allocate(request, request.num_tokens - cached.num_tokens, cached) is not None
    cache.cache_blocks(request, request.num_tokens)
    cache.free(request)


def begin(cache: KVCacheManager, request: Request, contains: Callable[[BlockKey], bool] = has_all, job: int = 0) -> int:
    """Begin a load; the number of its blocks."""
    prefix = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), contains)
    blocks = cache.begin_load(job, request, prefix)
    assert blocks is not None
    return len(blocks)


def test_what_was_loaded_is_found() -> None:
    cache = make_cache(enable_kv_cache_events=True)
    request = make_request("r", range(18))
    assert begin(cache, request) == 4
    assert cache.find_cached_prefix(request).num_tokens == 0, "not before it is over"
    assert cache.usage().num_free_blocks == 16
    cache.end_load(0, [True] * 4)
    assert cache.usage().num_free_blocks == 20
    assert cache.find_cached_prefix(request).num_tokens == 16
    (event,) = cache.take_events()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids) == (request.block_hashes, list(range(16)))
    cache.check_integrity()


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = make_cache()
    request = make_request("r", range(16))
    prefix = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_all)
    assert prefix.num_tokens == 12


def test_only_what_is_missing_is_loaded_and_the_rest_is_held() -> None:
    cache = make_cache(num_blocks=6)
    request = make_request("r", range(21))
    compute(cache, make_request("earlier", range(9)))
    prefix = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_all)
    assert (len(prefix.missing), prefix.num_blocks_wanted) == (3, 5)
    assert begin(cache, request) == 3
    assert cache.usage().num_free_blocks == 1, "the two blocks in memory are held as well"
    other = make_request("other", range(50, 54))
    assert cache.allocate(other, 4) is not None
    assert cache.allocate(make_request("third", range(60, 64)), 4) is None
    cache.end_load(0, [True] * 3)
    assert cache.find_cached_prefix(request).num_tokens == 20
    cache.check_integrity()


def test_a_prefix_ends_before_the_first_block_that_nobody_has() -> None:
    cache = make_cache()
    request = make_request("r", range(30))
    cache.find_cached_prefix(request)
    third = request.block_hashes[3]
    cached = cache.find_cached_prefix(request)
    prefix = cache.find_loadable_prefix(request, cached, lambda key: key.block_hash != third)
    assert prefix.num_tokens == 12
    assert prefix.missing == ((0, 0), (0, 1), (0, 2))
    assert cache.find_loadable_prefix(request, cached, has_none).missing == ()


def test_a_window_loads_only_what_is_read() -> None:
    cache = make_cache(window=5)
    request = make_request("r", range(18))
    prefix = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_all)
    assert prefix.num_tokens == 16
    assert [place for place in prefix.missing if place[0] == 0] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert [place for place in prefix.missing if place[0] == 1] == [(1, 3)], "positions 12 to 15 of the window"
    assert begin(cache, request) == 5
    cache.end_load(0, [True] * 5)
    assert cache.find_cached_prefix(request).block_ids[1][:3] == [0, 0, 0]
    assert cache.find_cached_prefix(request).num_tokens == 16


def test_what_did_not_arrive_is_not_findable() -> None:
    cache = make_cache()
    request = make_request("r", range(18))
    begin(cache, request)
    cache.end_load(0, [True, False, True, True])
    assert cache.find_cached_prefix(request).num_tokens == 4
    assert cache.usage().num_free_blocks == 20
    cache.check_integrity()


def test_a_load_does_not_fit() -> None:
    cache = make_cache(num_blocks=4)
    busy = make_request("busy", range(50, 55))
    assert cache.allocate(busy, 5) is not None
    request = make_request("r", range(13))
    prefix = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_all)
    assert prefix.num_blocks_wanted == 3
    assert cache.begin_load(0, request, prefix) is None
    assert cache.usage().num_free_blocks == 2
    cache.free(busy)
    assert cache.begin_load(0, request, prefix) is not None


def test_the_request_may_end_while_its_blocks_come() -> None:
    cache = make_cache()
    request = make_request("r", range(18))
    begin(cache, request)
    cache.free(request)
    cache.end_load(0, [True] * 4)
    assert cache.find_cached_prefix(make_request("next", range(18))).num_tokens == 16


def test_a_reset_lets_loads_go_on() -> None:
    cache = make_cache()
    compute(cache, make_request("earlier", range(9)))
    request = make_request("r", range(18))
    assert begin(cache, request) == 2
    assert cache.reset_prefix_cache()
    assert cache.find_cached_prefix(request).num_tokens == 0
    assert cache.usage().num_free_blocks == 18
    cache.check_integrity()
    cache.end_load(0, [True] * 2)
    assert cache.find_cached_prefix(request).num_tokens == 0, "its beginning was forgotten"
    assert cache.usage().num_free_blocks == 20
    cache.check_integrity()


def test_computed_blocks_are_reported_once_and_loaded_ones_never() -> None:
    reported: list[tuple[int, list[bytes]]] = []
    cache = make_cache(on_computed=lambda group, hashes: reported.append((group, hashes)))
    compute(cache, make_request("a", range(9)))
    compute(cache, make_request("b", range(9)))
    assert [(group, len(hashes)) for group, hashes in reported] == [(0, 2)]
    request = make_request("r", range(50, 68))
    begin(cache, request)
    cache.end_load(0, [True] * 4)
    assert len(reported) == 1
    assert cache.cached_block_id(BlockKey(0, reported[0][1][1])) is not None
    assert cache.cached_block_id(BlockKey(0, b"?")) is None


@pytest.mark.parametrize("reads", [True, False])
def test_no_prefix_caching_no_loading(reads: bool) -> None:
    cache = make_cache(enable_prefix_caching=not reads)
    request = make_request("r", range(18), reads_prefix_cache=reads)
    assert cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_all).num_tokens == 0


def test_misuse_is_an_error() -> None:
    cache = make_cache()
    request = make_request("r", range(18))
    prefix = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_all)
    nothing = cache.find_loadable_prefix(request, cache.find_cached_prefix(request), has_none)
    with pytest.raises(AllocatorMisuseError, match="no blocks"):
        cache.begin_load(0, request, nothing)
    assert cache.begin_load(0, request, prefix) is not None
    with pytest.raises(AllocatorMisuseError, match="under way already"):
        cache.begin_load(0, request, prefix)
    with pytest.raises(AllocatorMisuseError, match="with 3 blocks"):
        cache.end_load(0, [True] * 3)
    with pytest.raises(AllocatorMisuseError, match="load 7"):
        cache.end_load(7, [])
    cache.end_load(0, [True] * 4)
    with pytest.raises(AllocatorMisuseError, match="stale"):
        cache.begin_load(1, request, prefix)
    cache.check_integrity()
