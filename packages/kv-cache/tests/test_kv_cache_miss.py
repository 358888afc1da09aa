"""A miss has a reason that can be read."""

from __future__ import annotations

from collections.abc import Sequence

from quire_interfaces import FullAttentionSpec, KVCacheSpec, PrefixCacheMiss, SlidingWindowSpec
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_kv_cache.miss import PrefixHistory
from quire_testkit.conformance.block_allocator import make_request

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16")
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16", sliding_window=6)


def make_manager(*specs: KVCacheSpec, num_usable: int = 8) -> KVCacheManager:
    plan = plan_kv_cache({str(i): spec for i, spec in enumerate(specs or (FULL,))}, num_blocks=num_usable + 1)
    return KVCacheManager(plan, KVCacheConfig(block_size=4))


def run(manager: KVCacheManager, tokens: Sequence[int], salt: str | None = None) -> None:
    request = make_request("run", tokens, cache_salt=salt)
    assert manager.allocate(request, len(tokens)) is not None
    manager.cache_blocks(request, len(tokens))
    manager.free(request)


def explain(manager: KVCacheManager, tokens: Sequence[int], salt: str | None = None) -> PrefixCacheMiss:
    return manager.explain_miss(make_request("why", tokens, cache_salt=salt))


def test_where_it_ended_and_why() -> None:
    manager = make_manager()
    run(manager, range(12))
    miss = explain(manager, [*range(8), 99, 99, 99, 99, 1, 2])
    assert miss.num_hit_tokens == 8
    assert miss.reason == "never_stored"
    assert "tokens 8 to 11" in miss.detail


def test_evicted_and_reset_are_told_apart() -> None:
    manager = make_manager(num_usable=3)
    run(manager, range(12))
    run(manager, range(100, 108))
    miss = explain(manager, range(13))
    assert (miss.num_hit_tokens, miss.reason) == (4, "evicted")
    assert "needed for other tokens" in miss.detail
    assert manager.reset_prefix_cache()
    miss = explain(manager, range(5))
    assert (miss.num_hit_tokens, miss.reason) == (0, "evicted")
    assert "reset" in miss.detail


def test_salt_is_not_blamed_wrongly() -> None:
    manager = make_manager()
    run(manager, range(8), salt="one")
    assert explain(manager, range(8)).reason == "different_salt"
    assert explain(manager, range(50, 58)).reason == "never_stored"
    assert explain(manager, [*range(4), 9, 9, 9, 9, 9], salt="one").reason == "never_stored"
    assert "one" not in explain(manager, range(8), salt="two").detail


def test_the_missing_window_is_named() -> None:
    manager = make_manager(FULL, WINDOW, num_usable=30)
    request = make_request("a", range(16))
    manager.allocate(request, 12)
    request.num_computed_tokens = 12
    manager.allocate(request, 4)
    manager.cache_blocks(request, 16)
    # The window group never stored block 0, so nothing shorter than 12 tokens can be gone on after.
    miss = explain(manager, range(9))
    assert (miss.num_hit_tokens, miss.reason) == (0, "never_stored")
    assert "tokens 0 to 3" in miss.detail
    assert "group 1" in miss.detail
    assert explain(manager, range(17)).reason == "full_hit"


def test_a_hybrid_miss_whose_next_step_is_there() -> None:
    """A larger hit can fail far behind the end of the hit; the reason is still found."""
    manager = make_manager(FULL, WINDOW, num_usable=30)
    run(manager, range(20))
    for length in range(1, 40):
        miss = explain(manager, range(length))
        assert miss.reason in ("full_hit", "partial_block", "never_stored")
        assert (miss.reason == "never_stored") == (length > 24)


def test_history_is_bounded() -> None:
    history = PrefixHistory(3)
    history.remember_gone([bytes([i]) for i in range(3)], "first")
    history.remember_gone([bytes([0])], "again")
    history.remember_gone([bytes([3])], "later")
    assert history.gone == {b"\x02": "first", b"\x00": "again", b"\x03": "later"}
    for i in range(1000):
        history.remember_salt(str(i))
    assert len(history.salts) == 64
    assert "999" in history.salts


def test_asking_changes_nothing() -> None:
    manager = make_manager()
    run(manager, range(12))
    before = (manager.usage(), manager.prefix_cache_stats)
    explain(manager, range(13))
    explain(manager, range(13), salt="x")
    assert (manager.usage(), manager.prefix_cache_stats) == before
    manager.check_integrity()
