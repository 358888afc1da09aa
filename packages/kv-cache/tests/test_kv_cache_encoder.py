"""Blocks of cross-attention groups: as many as the encoder input needs, from the first step to the last, shared by
equal inputs only. Random traffic over them is in test_kv_cache_state_machine.py."""

from __future__ import annotations

import pytest

from quire_interfaces import (
    CachedPrefix,
    ConfigError,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    PromptMedia,
    Request,
)
from quire_kv_cache import AllocatorMisuseError, KVCacheConfig, KVCacheManager, max_concurrency, plan_kv_cache
from quire_testkit.conformance.block_allocator import make_request

SIZE = 4


def specs(num_layers: int = 3, max_encoder_tokens: int = 10) -> dict[str, KVCacheSpec]:
    cross = CrossAttentionSpec(
        block_size=SIZE, num_kv_heads=2, head_dim=8, dtype="float32", max_encoder_tokens=max_encoder_tokens
    )
    own = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_dim=8, dtype="float32")
    # Cross attention is named first, as a network might.
    return {f"{kind}.{i}": spec for i in range(num_layers) for kind, spec in (("cross", cross), ("own", own))}


def make_manager(num_usable: int, *, prefix_caching: bool = True) -> KVCacheManager:
    plan = plan_kv_cache(specs(), num_blocks=num_usable + 1)
    return KVCacheManager(plan, KVCacheConfig(block_size=SIZE, enable_prefix_caching=prefix_caching))


def request(name: str, encoder: list[int], prompt: list[int] | None = None, salt: str | None = None) -> Request:
    made = make_request(name, prompt or [1], cache_salt=salt)
    made.encoder_token_ids = encoder
    return made


def admit(manager: KVCacheManager, made: Request) -> CachedPrefix:
    cached = manager.find_cached_prefix(made)
    assert manager.allocate(made, made.num_tokens - cached.num_tokens, cached) is not None
    manager.cache_blocks(made, made.num_tokens)
    return cached


def test_the_plan_has_cross_attention_last_and_counts_it_once_per_request() -> None:
    plan = plan_kv_cache(specs(), num_blocks=101)
    assert [group.layer_names for group in plan.groups] == [
        ("own.0", "own.1", "own.2"), ("cross.0", "cross.1", "cross.2")
    ]  # fmt: skip
    assert len(plan.tensor_block_bytes) == 3
    # 8 tokens are 2 blocks; the encoder's 10 tokens are 3, however long the output is.
    assert max_concurrency(plan, 8) == pytest.approx(100 / 5)
    assert max_concurrency(plan, 80) == pytest.approx(100 / 23)
    assert KVCacheManager(plan, KVCacheConfig(block_size=SIZE)).max_request_tokens(64) == (100 - 3) * SIZE


def test_blocks_come_with_the_first_step_and_never_grow() -> None:
    manager = make_manager(6)
    made = request("a", list(range(9)))
    blocks = manager.allocate(made, 1, manager.find_cached_prefix(made))
    assert blocks is not None
    assert [len(table) for table in blocks] == [1, 3]
    made.num_computed_tokens = 1
    assert manager.allocate(made, 3) == ([], [])
    made.num_computed_tokens = 4
    more = manager.allocate(made, 1)
    assert more is not None
    assert [len(table) for table in more] == [1, 0]
    assert [len(table) for table in manager.block_ids("a")] == [2, 3]
    assert manager.allocate(request("b", [1]), 1) is None, "one block is free, two are needed"
    manager.check_integrity()
    manager.free(made)
    assert manager.usage().num_free_blocks == 6


def test_only_a_whole_equal_input_is_shared() -> None:
    manager = make_manager(40)
    first = request("first", list(range(9)), prompt=list(range(8)))
    assert not admit(manager, first).has_encoder
    same = admit(manager, request("same", list(range(9)), prompt=list(range(7))))
    assert same == (4, (manager.block_ids("first")[0][:1], manager.block_ids("first")[1]), True)
    for name, encoder, salt in (("longer", [*range(9), 9], None), ("other", [*range(8), 9], None),
                                ("salted", list(range(9)), "s")):  # fmt: skip
        cached = admit(manager, request(name, encoder, prompt=list(range(8)), salt=salt))
        assert cached == (0, ([], []), False), "the decoder's cache depends on what the encoder read, too"
    manager.check_integrity()


def test_the_encoders_blocks_are_evicted_last_and_count_only_together() -> None:
    manager = make_manager(8)
    made = request("a", list(range(9)), prompt=list(range(9)))
    admit(manager, made)
    manager.free(made)

    def found_after_taking(num_tokens: int) -> tuple[int, bool]:
        taker = request("taker", [5], prompt=list(range(20, 20 + num_tokens)))
        assert manager.allocate(taker, num_tokens, manager.find_cached_prefix(taker)) is not None
        manager.free(taker)
        manager.check_integrity()
        cached = manager.find_cached_prefix(request("again", list(range(9)), prompt=list(range(9))))
        return cached.num_tokens, cached.has_encoder

    # Two blocks were never used and one holds no whole block of tokens; every taker has one for its own encoder input.
    assert [found_after_taking(num * SIZE) for num in (2, 3, 4, 5)] == [(8, True), (4, True), (0, True), (0, False)]


def audio_request(name: str, audio: int) -> Request:
    made = request(name, [audio] * 9, prompt=list(range(8)))
    made.media = PromptMedia(spans=())
    return made


def test_audio_that_no_request_needs_makes_room_before_the_cache_is_full() -> None:
    manager = make_manager(1000)
    used: set[int] = set()
    for audio in range(20):
        for name in ("probe", "decode"):
            made = audio_request(name, audio)
            assert admit(manager, made).has_encoder == (name == "decode")
            used |= {block for table in manager.block_ids(name) for block in table}
            manager.free(made)
        manager.check_integrity()
    assert len(used) <= 6 * 5, "six inputs of three blocks, with two behind each"
    found = [manager.find_cached_prefix(audio_request("again", audio)) for audio in range(20)]
    assert [cached.has_encoder for cached in found] == [False] * 15 + [True] * 5
    assert [cached.num_tokens for cached in found] == [0] * 15 + [4] * 5, "what decoders wrote behind them goes along"


def test_as_many_inputs_stay_as_were_held_at_a_time() -> None:
    manager = make_manager(1000)
    many = [audio_request(f"{audio}", audio) for audio in range(9)]
    for made in many:
        admit(manager, made)
    for made in many:
        manager.free(made)
    held, *others = [audio_request(f"{audio}", audio) for audio in (4, 100, 101, 102)]
    admit(manager, held)
    manager.free(held)
    for made in others:
        admit(manager, made)

    def kept() -> list[int]:
        return [audio for audio in range(9) if manager.find_cached_prefix(audio_request("again", audio)).has_encoder]

    assert kept() == list(range(9)), "nine were held at a time, and nine are idle"
    for made in others:
        manager.free(made)
    admit(manager, audio_request("next", 103))
    assert kept() == [3, 4, 5, 6, 7, 8], "the one that was held last stays longest"
    for audio in (104, 105, 106):
        admit(manager, audio_request(f"{audio}", audio))
    assert kept() == [3, 4, 5, 6, 7, 8], "nine are idle"
    for made in others:
        admit(manager, made)
    assert kept() == [3, 4, 5, 6, 7, 8], "what is there again needs no room"
    manager.check_integrity()


def test_texts_that_encoders_read_stay_until_the_cache_is_full() -> None:
    manager = make_manager(1000)
    for text in range(20):
        made = request("a", [text] * 9)
        admit(manager, made)
        manager.free(made)
    assert all(manager.find_cached_prefix(request("b", [text] * 9)).has_encoder for text in range(20))


def test_nothing_is_found_with_prefix_caching_off() -> None:
    manager = make_manager(40, prefix_caching=False)
    admit(manager, request("a", [1, 2]))
    assert not admit(manager, request("b", [1, 2])).has_encoder


def test_a_stale_find_is_an_error() -> None:
    manager = make_manager(4)
    first = request("first", [1, 2])
    admit(manager, first)
    manager.free(first)
    late = request("late", [1, 2])
    cached = manager.find_cached_prefix(late)
    assert cached.has_encoder
    taker = request("taker", [3], prompt=list(range(12)))
    assert manager.allocate(taker, 12, manager.find_cached_prefix(taker)) is not None
    with pytest.raises(AllocatorMisuseError, match="encoder input of request 'late' is stale"):
        manager.allocate(late, 1, cached)


def test_impossible_groups_say_why() -> None:
    cross = {name: spec for name, spec in specs().items() if name.startswith("cross")}
    with pytest.raises(ConfigError, match="groups of the tokens themselves first"):
        KVCacheManager(plan_kv_cache(cross, num_blocks=9), KVCacheConfig(block_size=SIZE))
    with pytest.raises(ConfigError, match="max_encoder_tokens must be at least 1"):
        max_concurrency(plan_kv_cache(specs(max_encoder_tokens=0), num_blocks=9), 10)
