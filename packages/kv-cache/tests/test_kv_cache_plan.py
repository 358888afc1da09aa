"""Groups, tensors and block counts from what the layers keep."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import ConfigError, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire_kv_cache import max_concurrency, plan_kv_cache


def full(block_size: int = 16, heads: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_dim=64, dtype="bfloat16")


def sliding(window: int, block_size: int = 16, heads: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=heads, head_dim=64, dtype="bfloat16", sliding_window=window
    )


def test_equal_layers_form_one_group() -> None:
    plan = plan_kv_cache({f"layers.{i}": full() for i in range(28)}, memory_bytes=10_000_000)
    (group,) = plan.groups
    assert group.layer_names == tuple(f"layers.{i}" for i in range(28))
    block_bytes = 2 * 16 * 2 * 64 * 2
    assert plan.tensor_block_bytes == (block_bytes,) * 28
    assert plan.num_blocks == 10_000_000 // (28 * block_bytes)
    assert plan.total_bytes <= 10_000_000 < plan.total_bytes + 28 * block_bytes


def test_five_sliding_layers_per_full_one_become_five_groups() -> None:
    specs = {f"layers.{i}": full() if i % 6 == 5 else sliding(1024) for i in range(24)}
    plan = plan_kv_cache(specs, num_blocks=100)
    assert [len(group.layer_names) for group in plan.groups] == [4] * 6
    assert sum(isinstance(group.spec, SlidingWindowSpec) for group in plan.groups) == 5
    assert len(plan.tensor_block_bytes) == 4


def test_nearly_equal_counts_stay_two_groups() -> None:
    specs = {f"layers.{i}": full() if i % 2 else sliding(1024) for i in range(25)}
    plan = plan_kv_cache(specs, num_blocks=100)
    assert sorted(len(group.layer_names) for group in plan.groups) == [12, 13]
    assert len(plan.tensor_block_bytes) == 13


def test_a_tensor_is_as_wide_as_its_widest_layer() -> None:
    plan = plan_kv_cache({"a": full(heads=2), "b": sliding(32, heads=8), "c": sliding(32, heads=8)}, num_blocks=9)
    assert set(plan.tensor_block_bytes) == {sliding(32, heads=8).block_bytes}


@settings(deadline=None)
@given(
    kinds=st.lists(st.sampled_from([full(), full(heads=1), sliding(64), sliding(100)]), min_size=1, max_size=30),
    num_blocks=st.integers(40, 100),
)
def test_every_layer_has_its_place(kinds: list[KVCacheSpec], num_blocks: int) -> None:
    specs = {f"layers.{i}": spec for i, spec in enumerate(kinds)}
    plan = plan_kv_cache(specs, num_blocks=num_blocks)
    assert sorted(name for group in plan.groups for name in group.layer_names) == sorted(specs)
    for group in plan.groups:
        assert all(specs[name] == group.spec for name in group.layer_names)
        assert list(group.layer_names) == sorted(group.layer_names, key=list(specs).index)
        for i in range(len(group.layer_names)):
            assert plan.tensor_block_bytes[i] >= group.spec.block_bytes
    assert max(len(group.layer_names) for group in plan.groups) == len(plan.tensor_block_bytes)
    again = plan_kv_cache(specs, memory_bytes=plan.total_bytes)
    assert again == plan


def test_concurrency() -> None:
    plan = plan_kv_cache({"a": full()}, num_blocks=1001)
    assert max_concurrency(plan, 1600) == 10
    assert max_concurrency(plan, 1601) == pytest.approx(1000 / 101)
    windowed = plan_kv_cache({"a": sliding(33)}, num_blocks=1001)
    assert max_concurrency(windowed, 100_000) == pytest.approx(1000 / 3)
    assert max_concurrency(windowed, 100_000, max_step_tokens=160) == pytest.approx(1000 / 13)
    both = plan_kv_cache({"a": full(), "b": sliding(33)}, num_blocks=1001)
    assert max_concurrency(both, 1600) == pytest.approx(1000 / 103)


@pytest.mark.parametrize(
    ("specs", "limits", "message"),
    [
        ({}, {"num_blocks": 10}, "no layer"),
        ({"a": full(16), "b": full(32)}, {"num_blocks": 10}, r"\[16, 32\]"),
        ({"a": full(0)}, {"num_blocks": 10}, "block_size must be at least 1"),
        ({"a": full()}, {}, "neither"),
        ({"a": full()}, {"num_blocks": 10, "memory_bytes": 10}, "both"),
        ({"a": full()}, {"num_blocks": 1}, "at least 2"),
        ({"a": full(), "b": sliding(8)}, {"num_blocks": 2}, "at least 3"),
        ({"a": full()}, {"memory_bytes": 8192}, "needs at least 16384 bytes"),
        ({"a": full()}, {"memory_bytes": 0}, "only 0 are left"),
        ({"a": full()}, {"memory_bytes": -5}, "only -5 are left"),
        ({"a": full(heads=0)}, {"memory_bytes": 100}, "at least one byte"),
    ],
)
def test_impossible_plans_say_why(specs: Any, limits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kv_cache(specs, **limits)


def test_impossible_concurrency_questions() -> None:
    plan = plan_kv_cache({"a": full()}, num_blocks=10)
    with pytest.raises(ConfigError, match="max_model_len"):
        max_concurrency(plan, 0)
    with pytest.raises(ConfigError, match="max_step_tokens"):
        max_concurrency(plan, 10, max_step_tokens=0)


def test_a_tensor_that_only_one_group_uses_is_as_wide_as_its_layers() -> None:
    specs = {f"layers.{i}": full(heads=1) if i % 2 == 0 else sliding(1024, heads=8) for i in range(25)}
    plan = plan_kv_cache(specs, num_blocks=100)
    assert plan.tensor_block_bytes == (sliding(1024, heads=8).block_bytes,) * 12 + (full(heads=1).block_bytes,)
