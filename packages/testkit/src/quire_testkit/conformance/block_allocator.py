"""What every `BlockAllocator` must do, as tests to inherit.

    class TestMyAllocator(BlockAllocatorSuite):
        def make_allocator(self, **options): return MyAllocator(...)

The suite sees an allocator only through the Protocol; it knows no hash algorithm and no eviction policy beyond what the
Protocol promises.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_interfaces import (
    NULL_BLOCK_ID,
    AllBlocksCleared,
    BlockAllocator,
    BlockRemoved,
    BlockStored,
    CachedPrefix,
    Request,
    RequestOptions,
    SamplingParams,
)

__all__ = ["BlockAllocatorSuite", "make_request"]

BLOCK = 4
"""Tokens in a block, in all tests."""


def make_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    cache_salt: str | None = None,
    cache_extra_keys: tuple[tuple[int, int, str], ...] = (),
    reads_prefix_cache: bool = True,
) -> Request:
    """A request about which a KV cache has no reason to know more."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(),
        seed=0,
        max_tokens=1_000_000,
        options=RequestOptions(cache_salt=cache_salt),
        cache_extra_keys=cache_extra_keys,
        reads_prefix_cache=reads_prefix_cache,
    )


class BlockAllocatorSuite:
    """Tests of the `BlockAllocator` contract. Implement `make_allocator`; override nothing else."""

    def make_allocator(
        self,
        *,
        num_usable_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        enable_prefix_caching: bool = True,
        enable_events: bool = False,
    ) -> BlockAllocator:
        """A fresh allocator.

        Args:
            num_usable_blocks: Blocks that can be handed out (without the null block).
            block_size: Tokens in a block, for all groups.
            windows: One KV cache group per element: its sliding window in tokens, or None for full attention.
            enable_prefix_caching: Whether prefixes are shared at all.
            enable_events: Whether events are recorded.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement make_allocator")

    # A request's way through the cache, as a scheduler drives it.

    def start(self, allocator: BlockAllocator, request: Request) -> CachedPrefix:
        """Find the prefix, allocate for the whole prompt, compute it, make it findable."""
        cached = allocator.find_cached_prefix(request)
        assert allocator.allocate(request, request.num_tokens - cached.num_tokens, cached) is not None
        request.num_computed_tokens = request.num_tokens
        allocator.cache_blocks(request, request.num_tokens)
        return cached

    def run(self, allocator: BlockAllocator, request: Request) -> CachedPrefix:
        """Start and finish."""
        cached = self.start(allocator, request)
        allocator.free(request)
        return cached

    def num_cached(self, allocator: BlockAllocator, token_ids: Sequence[int], salt: str | None = None) -> int:
        return allocator.find_cached_prefix(make_request("probe", token_ids, cache_salt=salt)).num_tokens

    # Allocation

    def test_fresh_allocator_is_free(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=7, block_size=BLOCK)
        assert allocator.usage() == (7, 7)
        assert allocator.num_groups == 1
        assert allocator.num_slots("nobody") == 0

    def test_longest_request_fills_the_cache(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=7, block_size=BLOCK)
        assert allocator.max_request_tokens(1) == 7 * BLOCK
        assert allocator.allocate(make_request("a", range(7 * BLOCK)), 7 * BLOCK) is not None

    def test_allocates_whole_blocks_and_reports_slots(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=7, block_size=BLOCK)
        request = make_request("a", range(5))
        blocks = allocator.allocate(request, 5)
        assert blocks is not None
        assert len(blocks[0]) == 2
        assert NULL_BLOCK_ID not in blocks[0]
        assert allocator.num_slots("a") == 2 * BLOCK
        assert allocator.block_ids("a") == blocks
        assert allocator.usage() == (5, 7)

    def test_room_in_the_last_block_needs_no_block(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=7, block_size=BLOCK)
        request = make_request("a", range(5))
        allocator.allocate(request, 5)
        request.num_computed_tokens = 5
        assert allocator.allocate(request, 3) == ([],)
        grown = allocator.allocate(request, 4)
        assert grown is not None
        assert len(grown[0]) == 1
        assert len(allocator.block_ids("a")[0]) == 3

    def test_lookahead_reserves_slots(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=7, block_size=BLOCK)
        request = make_request("a", range(4))
        allocator.allocate(request, 4, None, 1)
        assert allocator.num_slots("a") == 2 * BLOCK

    def test_refuses_without_change_when_full(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=3, block_size=BLOCK)
        first, second = make_request("a", range(8)), make_request("b", range(50, 60))
        allocator.allocate(first, 8)
        assert allocator.allocate(second, 10) is None
        assert allocator.usage() == (1, 3)
        assert allocator.num_slots("b") == 0
        first.num_computed_tokens = 8
        assert allocator.allocate(first, 5) is None
        assert len(allocator.block_ids("a")[0]) == 2
        assert allocator.allocate(first, 4) is not None

    def test_refusal_keeps_cached_prefix(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK)
        self.run(allocator, make_request("old", range(9)))
        request = make_request("a", range(30))
        cached = allocator.find_cached_prefix(request)
        assert cached.num_tokens == 8
        assert allocator.allocate(request, 22, cached) is None
        assert allocator.usage() == (4, 4)
        assert self.num_cached(allocator, range(9)) == 8

    def test_cached_blocks_are_not_counted_as_room_for_new_ones(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=3, block_size=BLOCK)
        self.run(allocator, make_request("old", range(8)))
        request = make_request("a", range(20))
        cached = allocator.find_cached_prefix(request)
        assert cached.num_tokens == 8
        # All three blocks are free, but two of them are the prefix itself: one is left, five tokens need two.
        assert allocator.allocate(request, 5, cached) is None
        blocks = allocator.allocate(request, 4, cached)
        assert blocks is not None
        assert len(set(blocks[0])) == 3

    def test_free_returns_everything_and_is_a_no_op_for_strangers(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=5, block_size=BLOCK)
        request = make_request("a", range(10))
        self.start(allocator, request)
        allocator.free(request)
        assert allocator.usage() == (5, 5)
        allocator.free(request)
        allocator.free(make_request("stranger", range(3)))
        assert allocator.usage() == (5, 5)

    def test_no_block_is_held_by_two_unrelated_requests(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=12, block_size=BLOCK)
        held: set[int] = set()
        for i in range(4):
            blocks = allocator.allocate(make_request(str(i), range(100 * i, 100 * i + 9)), 9)
            assert blocks is not None
            assert held.isdisjoint(blocks[0])
            held.update(blocks[0])

    # Prefixes

    def test_finds_whole_blocks_of_an_equal_beginning(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=20, block_size=BLOCK)
        old = make_request("old", range(11))
        self.start(allocator, old)
        new = make_request("new", [*range(10), 99, 98, 97])
        cached = allocator.find_cached_prefix(new)
        assert cached.num_tokens == 8
        assert cached.block_ids[0] == allocator.block_ids("old")[0][:2]
        assert len(new.block_hashes) == 3
        blocks = allocator.allocate(new, 5, cached)
        assert blocks is not None
        assert blocks[0][:2] == cached.block_ids[0]
        assert len(blocks[0]) == 4
        assert allocator.block_ids("new") == blocks

    def test_leaves_one_token_to_compute(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=20, block_size=BLOCK)
        self.run(allocator, make_request("old", range(8)))
        assert self.num_cached(allocator, range(8)) == 4
        assert self.num_cached(allocator, range(9)) == 8
        assert self.num_cached(allocator, range(3)) == 0

    def test_finding_changes_nothing(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK)
        self.run(allocator, make_request("old", range(16)))
        for _ in range(3):
            assert self.num_cached(allocator, range(17)) == 16
        assert allocator.usage() == (4, 4)

    def test_only_computed_tokens_are_findable(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=20, block_size=BLOCK)
        request = make_request("a", range(12))
        allocator.allocate(request, 12, allocator.find_cached_prefix(request))
        assert self.num_cached(allocator, range(12)) == 0
        assert allocator.cache_blocks(request, 7) == 8, "the next block is complete then"
        assert self.num_cached(allocator, range(12)) == 4
        allocator.cache_blocks(request, 8)
        allocator.cache_blocks(request, 8)
        assert self.num_cached(allocator, range(12)) == 8

    def test_outputs_are_findable(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=20, block_size=BLOCK)
        request = make_request("a", range(6))
        self.start(allocator, request)
        for token in range(6, 13):
            request.output_token_ids.append(token)
            assert allocator.allocate(request, 1) is not None
            request.num_computed_tokens += 1
            allocator.cache_blocks(request, request.num_computed_tokens)
        assert self.num_cached(allocator, range(13)) == 12

    def test_other_beginning_means_other_blocks(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=20, block_size=BLOCK)
        self.run(allocator, make_request("old", range(12)))
        assert self.num_cached(allocator, [77, *range(1, 12)]) == 0
        assert self.num_cached(allocator, [*range(4), 77, *range(5, 12)]) == 4

    def test_salts_are_kept_apart(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=40, block_size=BLOCK)
        self.run(allocator, make_request("old", range(12), cache_salt="one"))
        assert self.num_cached(allocator, range(12)) == 0
        assert self.num_cached(allocator, range(12), "two") == 0
        assert self.num_cached(allocator, range(12), "one") == 8

    def test_extra_keys_are_kept_apart(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=40, block_size=BLOCK)
        self.run(allocator, make_request("old", range(13), cache_extra_keys=((5, 7, "cat"),)))

        def hit(*keys: tuple[int, int, str]) -> int:
            return allocator.find_cached_prefix(make_request("new", range(13), cache_extra_keys=keys)).num_tokens

        assert hit((5, 7, "cat")) == 12
        assert hit((5, 7, "dog")) == 4
        assert hit((4, 7, "cat")) == 4
        assert hit() == 4

    def test_requests_that_do_not_read_still_write(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=40, block_size=BLOCK)
        for name in ("a", "b"):
            request = make_request(name, range(12), reads_prefix_cache=False)
            assert self.run(allocator, request).num_tokens == 0
        assert self.num_cached(allocator, range(12)) == 8

    def test_nothing_is_shared_when_switched_off(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=40, block_size=BLOCK, enable_prefix_caching=False)
        self.run(allocator, make_request("old", range(12)))
        assert self.num_cached(allocator, range(12)) == 0
        assert allocator.explain_miss(make_request("new", range(12))).reason == "disabled"

    # Eviction

    def test_beginnings_live_longest(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK)
        self.run(allocator, make_request("old", range(16)))
        for taken in range(1, 5):
            allocator.allocate(make_request(f"new{taken}", [taken * 100]), 1)
            assert self.num_cached(allocator, range(17)) == 16 - taken * BLOCK

    def test_used_blocks_are_not_evicted(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK)
        self.start(allocator, make_request("old", range(8)))
        self.run(allocator, make_request("other", range(50, 58)))
        assert allocator.allocate(make_request("big", range(100, 112)), 12) is None
        assert allocator.allocate(make_request("fits", range(100, 108)), 8) is not None
        assert self.num_cached(allocator, range(9)) == 8
        assert self.num_cached(allocator, range(50, 59)) == 0

    def test_shared_blocks_outlive_one_of_their_requests(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=6, block_size=BLOCK)
        first, second = make_request("a", range(9)), make_request("b", range(9))
        self.start(allocator, first)
        assert self.start(allocator, second).num_tokens == 8
        assert allocator.usage().num_free_blocks == 2
        allocator.free(first)
        assert allocator.usage().num_free_blocks == 3
        assert allocator.allocate(make_request("c", range(100, 112)), 12) is not None
        assert self.num_cached(allocator, range(9)) == 8

    def test_reset_only_when_nothing_is_used(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=6, block_size=BLOCK)
        request = make_request("a", range(9))
        self.start(allocator, request)
        assert not allocator.reset_prefix_cache()
        assert self.num_cached(allocator, range(9)) == 8
        allocator.free(request)
        assert allocator.reset_prefix_cache()
        assert self.num_cached(allocator, range(9)) == 0
        assert allocator.usage() == (6, 6)

    # Sliding windows

    def test_blocks_before_the_window_come_back(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK, windows=(5,))
        request = make_request("a", range(BLOCK))
        self.start(allocator, request)
        for token in range(100):
            request.output_token_ids.append(token)
            assert allocator.allocate(request, 1) is not None
            request.num_computed_tokens += 1
            table = allocator.block_ids("a")[0]
            first_read = max(request.num_computed_tokens - 5, 0) // BLOCK
            assert all(table[first_read:])
            assert sum(block != NULL_BLOCK_ID for block in table) <= 3

    def test_a_window_hit_needs_only_the_window(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=20, block_size=BLOCK, windows=(6,))
        self.run(allocator, make_request("old", range(20)))
        cached = allocator.find_cached_prefix(make_request("new", range(20)))
        # Token 16 reads 11 to 16: blocks 2 and 3.
        assert cached.num_tokens == 16
        assert [block == NULL_BLOCK_ID for block in cached.block_ids[0]] == [True, True, False, False]

    def test_groups_agree_on_the_prefix(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=40, block_size=BLOCK, windows=(None, 6))
        old = make_request("old", range(20))
        self.run(allocator, old)
        new = make_request("new", range(21))
        cached = allocator.find_cached_prefix(new)
        assert cached.num_tokens == 20
        assert all(cached.block_ids[0])
        assert len(cached.block_ids[1]) == 5
        full, sliding = cached.block_ids
        assert set(full).isdisjoint(block for block in sliding if block != NULL_BLOCK_ID)
        blocks = allocator.allocate(new, 1, cached)
        assert blocks is not None
        assert blocks == allocator.block_ids("new")
        assert len(blocks[0]) == len(blocks[1]) == 6

    # Events and explanations

    def test_events_tell_what_is_findable(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK, enable_events=True)
        old = make_request("old", range(13), cache_salt="salt")
        self.run(allocator, old)
        (stored,) = allocator.take_events()
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == old.block_hashes
        assert stored.parent_block_hash is None
        assert stored.token_ids == list(range(12))
        assert stored.block_size == BLOCK
        assert [bool(keys) for keys in stored.extra_keys] == [True, False, False]
        self.start(allocator, make_request("new", range(100, 109)))
        removed, stored_again = allocator.take_events()
        assert isinstance(removed, BlockRemoved)
        assert set(removed.block_hashes) == {old.block_hashes[1], old.block_hashes[2]}
        assert isinstance(stored_again, BlockStored)
        assert allocator.take_events() == []
        numbers = [stored.sequence_number, removed.sequence_number, stored_again.sequence_number]
        assert numbers == sorted(set(numbers))

    def test_reset_is_an_event(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK, enable_events=True)
        assert allocator.reset_prefix_cache()
        (event,) = allocator.take_events()
        assert isinstance(event, AllBlocksCleared)

    def test_no_events_when_switched_off(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK)
        self.run(allocator, make_request("old", range(13)))
        assert allocator.take_events() == []

    def test_misses_have_reasons(self) -> None:
        allocator = self.make_allocator(num_usable_blocks=4, block_size=BLOCK)
        self.run(allocator, make_request("old", range(9), cache_salt="one"))

        def reason(token_ids: Sequence[int], salt: str | None = "one", reads: bool = True) -> str:
            request = make_request("new", token_ids, cache_salt=salt, reads_prefix_cache=reads)
            return allocator.explain_miss(request).reason

        assert reason(range(9)) == "full_hit"
        assert reason(range(4)) == "partial_block"
        assert reason(range(20)) == "never_stored"
        assert reason(range(9), salt="two") == "different_salt"
        assert reason(range(9), reads=False) == "not_readable"
        self.start(allocator, make_request("big", range(100, 112)))
        assert reason(range(9)) == "evicted"
