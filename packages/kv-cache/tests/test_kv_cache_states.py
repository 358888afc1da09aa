"""State-space groups: which blocks get a state, how long they are kept, and where another request goes on from."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import ConfigError, FullAttentionSpec, KVCacheSpec, MambaSpec, StateTensor
from quire_kv_cache import KVCacheConfig, KVCacheManager, max_concurrency, plan_kv_cache, state_block_size
from quire_kv_cache.groups import make_group_policy
from quire_testkit.conformance.block_allocator import make_request

SIZE = 4


def state_spec(block_size: int = SIZE, numbers: int = 100) -> MambaSpec:
    states = (StateTensor("conv", (3, 5), "bfloat16"), StateTensor("ssm", (numbers,), "float32"))
    return MambaSpec(block_size=block_size, states=states)


def make_manager(num_blocks: int = 30, *, caching: bool = True, attention: bool = False) -> KVCacheManager:
    specs = {"0": state_spec()}
    if attention:
        specs |= {"1": FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_dim=4, dtype="float32")}  # type: ignore[dict-item]
    config = KVCacheConfig(block_size=SIZE, enable_prefix_caching=caching)
    return KVCacheManager(plan_kv_cache(specs, num_blocks=num_blocks), config)


def test_a_step_fills_the_last_whole_block_and_the_one_it_ends_in() -> None:
    manager = make_manager()
    request = make_request("a", list(range(23)))
    (table,) = manager.allocate(request, 22) or ()
    assert [bool(block) for block in table] == [False, False, False, False, True, True]
    request.num_computed_tokens = 22
    manager.cache_blocks(request, 22)
    assert manager.usage().num_total_blocks - manager.usage().num_free_blocks == 2
    # The next token reads the running state only; the other one is findable and may go.
    assert manager.allocate(request, 1) == ([],)
    assert [bool(block) for block in manager.block_ids("a")[0]] == [False] * 5 + [True]
    manager.check_integrity()


def test_a_step_that_ends_with_a_block_fills_one() -> None:
    manager = make_manager()
    (table,) = manager.allocate(make_request("a", list(range(30))), 24) or ()
    assert [bool(block) for block in table] == [False] * 5 + [True]


def test_a_step_with_drafts_has_a_block_wherever_it_may_end() -> None:
    manager = make_manager()
    request = make_request("a", list(range(14)))
    (table,) = manager.allocate(request, 14 + 7) or ()  # with room for drafts
    assert [bool(block) for block in table] == [False, False, True, True, True, True]
    request.num_computed_tokens = 14
    request.output_token_ids.append(1)
    (table,) = manager.allocate(request, 1 + 17) or ()
    assert [bool(block) for block in table] == [True, True]
    request.num_computed_tokens += 2  # one of the drafts was right
    request.output_token_ids += [1, 1]
    assert all(manager.block_ids("a")[0][3:])
    manager.check_integrity()


def test_another_request_goes_on_from_the_state_at_a_steps_last_whole_block() -> None:
    manager = make_manager(attention=True)
    first = make_request("a", list(range(22)))
    manager.allocate(first, 22)
    first.num_computed_tokens = 22
    # The step is in flight while the next one is planned: what it fills must not be let go before it is findable.
    first.output_token_ids.append(1)
    manager.allocate(first, 1)
    manager.cache_blocks(first, 22)
    assert manager.find_cached_prefix(make_request("b", list(range(22)))).num_tokens == 20
    assert manager.find_cached_prefix(make_request("b", list(range(20)))).num_tokens == 0, "no state after 16"
    manager.free(first)
    second = make_request("c", list(range(40)))
    cached = manager.find_cached_prefix(second)
    assert cached.num_tokens == 20
    assert [[bool(block) for block in table] for table in cached.block_ids] == [[False] * 4 + [True], [True] * 5]
    assert manager.allocate(second, 20, cached) is not None
    manager.check_integrity()


def test_decode_leaves_a_state_at_the_end_of_each_block() -> None:
    manager = make_manager()
    request = make_request("a", [0])
    for position in range(20):
        assert manager.allocate(request, 1) is not None
        request.num_computed_tokens = position + 1
        manager.cache_blocks(request, position + 1)
        request.output_token_ids.append(position)
        assert manager.usage().num_total_blocks - manager.usage().num_free_blocks <= 2
    for known in range(5, 21):
        other = make_request("b", request.token_ids(0, known))
        assert manager.find_cached_prefix(other).num_tokens == (known - 1) // SIZE * SIZE


def test_states_in_flight_give_way_where_room_is_short() -> None:
    manager = make_manager(num_blocks=4)
    request = make_request("a", list(range(40)))
    assert manager.max_request_tokens(10) > 40
    for start in range(0, 40, 10):
        assert manager.allocate(request, 10) is not None, start
        request.num_computed_tokens = start + 10
    manager.check_integrity()


@settings(deadline=None)
@given(size=st.sampled_from([1, 2, 4]), num_tokens=st.integers(1, 60), step=st.integers(1, 20))
def test_bound_of_blocks_is_reached_and_not_passed(size: int, num_tokens: int, step: int) -> None:
    policy = make_group_policy(state_spec(size))
    held = []
    for start in range(num_tokens):
        end = min(start + step, num_tokens)
        written = range(max(policy.first_written_block(end), -(-start // size)), -(-end // size))
        held.append(len({*written, *range(policy.first_read_block(start), -(-start // size))}))
    bound = policy.max_blocks(num_tokens, step)
    assert max(held) <= bound
    assert num_tokens < step + 3 * size or max(held) == bound


def test_states_of_several_dtypes_share_one_pool_with_keys() -> None:
    spec = state_spec(numbers=1000)
    assert spec.block_bytes == 64 + 4032
    attention = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_dim=5, dtype="bfloat16")
    specs = {"0": spec, "1": spec, "2": spec, "3": attention}
    plan = plan_kv_cache(specs, num_blocks=50)
    assert plan.tensor_block_bytes == (4096,), "the attention layer pays for a state's block"
    assert [len(group.layer_names) for group in plan.groups] == [1, 1, 1, 1]
    assert max_concurrency(plan, 100) == pytest.approx(49 / (3 * 2 + 25))


def test_a_state_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="state"):
        make_group_policy(MambaSpec(block_size=4, states=()))


def test_blocks_grow_until_keys_take_as_much_as_a_state() -> None:
    def specs(block_size: int, *, states: bool = True, keys: bool = True) -> dict[str, KVCacheSpec]:
        attention = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=4, dtype="float32")  # 32 bytes
        found: dict[str, KVCacheSpec] = {"0": attention} if keys else {}
        return found | {"1": state_spec(block_size, numbers=2048)} if states else found  # 8256 bytes

    assert state_block_size(specs, 16) == 512
    assert state_block_size(specs, 1024) == 1024
    assert state_block_size(partial(specs, keys=False), 16) == 128
    assert state_block_size(partial(specs, states=False), 16) == 16


def test_blocks_without_a_state_need_no_room() -> None:
    """A step over many blocks takes two: it fits where there is room for two, also for a request that has some."""
    manager = make_manager(num_blocks=6)
    request = make_request("a", list(range(100)))
    assert manager.allocate(request, 10) is not None
    assert manager.usage().num_free_blocks == 3
    request.num_computed_tokens = 10
    (table,) = manager.allocate(request, 80) or ()
    assert [bool(block) for block in table] == [False] * 18 + [True, True]
    manager.check_integrity()


@settings(deadline=None)
@given(block_size=st.sampled_from([1, 2, 4, 16]), position=st.integers(0, 200))
def test_the_state_before_a_token_is_read_until_the_next_block_has_one(block_size: int, position: int) -> None:
    policy = make_group_policy(state_spec(block_size))
    first = policy.first_read_block(position)
    at = policy.next_release(first)
    assert policy.first_read_block(at) == first + 1
    assert policy.first_read_block(at - 1) == first
