"""Which prefix a group, and all groups together, can go on after: against looking at every candidate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import (
    ChunkedLocalSpec,
    ConfigError,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingLatentSpec,
    SlidingWindowSpec,
)
from quire_kv_cache.coordinator import prefix_block_ids, shared_prefix_blocks
from quire_kv_cache.groups import FullAttentionGroup, GroupPolicy, SlidingWindowGroup, make_group_policy
from quire_kv_cache.prefix_index import PrefixIndex

PRESENT = st.sets(st.integers(0, 11)) | st.sets(st.integers(0, 11), max_size=3).map(lambda gone: set(range(12)) - gone)
"""Blocks a group has: any, or all but a few."""
HASHES = [bytes([i]) for i in range(12)]


def make(window: int | None, block_size: int) -> GroupPolicy:
    if window is None:
        return make_group_policy(FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="bfloat16"))
    return make_group_policy(
        SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="bfloat16", sliding_window=window)
    )


def test_latents_of_a_window_have_its_policy() -> None:
    spec = SlidingLatentSpec(block_size=4, width=8, dtype="bfloat16", sliding_window=6)
    policy, window = make_group_policy(spec), make(6, 4)
    assert type(policy) is type(window)
    assert [policy.first_read_block(end) for end in range(40)] == [window.first_read_block(end) for end in range(40)]


def goes_on_after(window: int | None, block_size: int, present: set[int], num_blocks: int) -> bool:
    """Whether every position that token num_blocks * block_size reads, other than its own, is present."""
    end = num_blocks * block_size
    first = 0 if window is None else max(end - window + 1, 0)
    return all(position // block_size in present for position in range(first, end))


@settings(deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 4]),
    groups=st.lists(st.tuples(st.none() | st.integers(1, 20), PRESENT), min_size=1, max_size=4),
    max_blocks=st.integers(0, 12),
)
def test_longest_prefix_is_the_longest(
    block_size: int, groups: list[tuple[int | None, set[int]]], max_blocks: int
) -> None:
    policies = [make(window, block_size) for window, _ in groups]
    indexes = [PrefixIndex() for _ in groups]
    for number, (index, (_, present)) in enumerate(zip(indexes, groups, strict=True)):
        for block in present:
            index.insert(HASHES[block], 1 + number * 100 + block)
    expected = max(
        n
        for n in range(max_blocks + 1)
        if all(goes_on_after(window, block_size, present, n) for window, present in groups)
    )
    found = shared_prefix_blocks(policies, [index.blocks for index in indexes], HASHES, max_blocks)
    assert found == expected
    tables = prefix_block_ids(policies, indexes, HASHES, found, block_size)
    for number, (table, (window, _)) in enumerate(zip(tables, groups, strict=True)):
        first = 0 if window is None else max(found * block_size - window + 1, 0) // block_size
        assert table == [0] * first + [1 + number * 100 + block for block in range(first, found)]


def test_a_later_groups_cut_is_put_to_the_earlier_ones() -> None:
    # The window group can go on after 3 blocks (block 2 is there); the full one cuts to 2, where the window is gone.
    policies = [make(4, 4), make(None, 4)]
    indexes = [PrefixIndex(), PrefixIndex()]
    for number, (index, blocks) in enumerate(zip(indexes, ([0, 2], [0, 1]), strict=True)):
        for block in blocks:
            index.insert(HASHES[block], 1 + number * 100 + block)
    assert shared_prefix_blocks(policies, [index.blocks for index in indexes], HASHES, 3) == 1


@settings(deadline=None)
@given(window=st.integers(1, 40), block_size=st.sampled_from([1, 2, 4, 16]), position=st.integers(0, 200))
def test_window_reads_from_here_on(window: int, block_size: int, position: int) -> None:
    policy = make(window, block_size)
    first = policy.first_read_block(position)
    assert first == max(position - window + 1, 0) // block_size
    at = policy.next_release(first)
    assert policy.first_read_block(at) == first + 1
    assert policy.first_read_block(at - 1) == first


@settings(deadline=None)
@given(
    window=st.integers(1, 20),
    block_size=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(1, 60),
    step=st.integers(1, 20),
)
def test_window_bound_is_reached_and_not_passed(window: int, block_size: int, num_tokens: int, step: int) -> None:
    policy = make(window, block_size)
    held = [
        -(-min(start + step, num_tokens) // block_size) - policy.first_read_block(start) for start in range(num_tokens)
    ]
    bound = policy.max_blocks(num_tokens, step)
    assert max(held) <= bound
    if num_tokens > window + step + 2 * block_size:
        assert max(held) == bound


def make_chunked(chunk: int, block_size: int) -> GroupPolicy:
    return make_group_policy(
        ChunkedLocalSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="bfloat16", chunk_tokens=chunk)
    )


@settings(deadline=None)
@given(
    blocks_per_chunk=st.integers(1, 5),
    block_size=st.sampled_from([1, 2, 4]),
    present=PRESENT,
    max_blocks=st.integers(0, 12),
    position=st.integers(0, 200),
    step=st.integers(1, 20),
)
def test_chunks_against_every_token(
    blocks_per_chunk: int, block_size: int, present: set[int], max_blocks: int, position: int, step: int
) -> None:
    chunk = blocks_per_chunk * block_size
    policy = make_chunked(chunk, block_size)

    def reads(token: int) -> range:
        """What the token reads beside itself."""
        return range(token - token % chunk, token)

    index = {HASHES[block] for block in present}
    wanted = [n for n in range(max_blocks + 1) if all(t // block_size in present for t in reads(n * block_size))]
    assert policy.longest_prefix(index, HASHES, max_blocks) == max(wanted)
    first = policy.first_read_block(position)
    assert first == reads(position).start // block_size
    at = policy.next_release(first)
    assert policy.first_read_block(at) > first
    assert policy.first_read_block(at - 1) == first
    held = [-(-min(start + step, 99) // block_size) - policy.first_read_block(start) for start in range(99)]
    assert max(held) <= policy.max_blocks(99, step)
    if 2 * chunk + step < 99:
        assert max(held) == policy.max_blocks(99, step)


def test_a_subclass_gets_the_nearest_policy() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Scaled(SlidingWindowSpec):
        scale: float = 1.0

    spec = Scaled(block_size=4, num_kv_heads=1, head_dim=1, dtype="bfloat16", sliding_window=8)
    assert isinstance(make_group_policy(spec), SlidingWindowGroup)
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=1, dtype="bfloat16")
    assert isinstance(make_group_policy(full), FullAttentionGroup)


def test_unknown_specs_and_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="KVCacheSpec"):
        make_group_policy(KVCacheSpec(block_size=4))
    with pytest.raises(ConfigError, match="sliding_window"):
        make(0, 4)
    with pytest.raises(ConfigError, match="chunks of 6 tokens are not whole blocks of 4"):
        make_chunked(6, 4)
