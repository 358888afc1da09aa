"""The KV cache's memory: shapes, sharing between groups, and plans that cannot work."""

from __future__ import annotations

import pytest
import torch
from runner_harness import VOCAB_SIZE, TinyNetwork, cache_shape

from quire_interfaces import (
    ConfigError,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    KVCacheSpec,
    SlidingWindowSpec,
)
from quire_kv_cache import plan_kv_cache
from quire_ops import kv_cache_shape, ops
from quire_runner import ModelRunner, RunnerConfig, allocate_kv_caches
from quire_runner.kv_cache import copy_tokens


def full(heads: int = 2, dtype: str = "float32") -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=heads, head_dim=8, dtype=dtype)


def window(heads: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=4, num_kv_heads=heads, head_dim=8, dtype="float32", sliding_window=6)


def allocate(plan: KVCachePlan) -> dict[str, torch.Tensor]:
    return allocate_kv_caches(plan, device="cpu", cache_shape=cache_shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_layer_has_its_own_zeros(dtype: torch.dtype) -> None:
    plan = plan_kv_cache({f"l{i}": full(dtype=str(dtype).removeprefix("torch.")) for i in range(3)}, num_blocks=6)
    caches = allocate(plan)
    assert [cache.shape for cache in caches.values()] == [cache_shape(6, 4, 2, 8)] * 3
    for cache in caches.values():
        assert cache.dtype == dtype
        assert cache.is_contiguous()
        assert not cache.any()
    caches["l0"].fill_(1)
    assert not caches["l1"].any()
    assert sum(cache.nbytes for cache in caches.values()) == plan.total_bytes


def test_groups_share_memory_by_block_id() -> None:
    plan = plan_kv_cache({"f": full(), "w": window()}, num_blocks=6)
    caches = allocate(plan)
    assert plan.total_bytes == caches["f"].nbytes
    caches["f"][2] = 1
    caches["w"][3] = 2
    assert (caches["f"][2] == 1).all()
    assert (caches["w"][2] == 1).all()
    assert (caches["w"][3] == 2).all()
    assert not caches["f"][4:].any()


def test_layers_of_unequal_size_share_a_tensor_without_meeting() -> None:
    plan = plan_kv_cache({"f": full(heads=2), "w": window(heads=5)}, num_blocks=6)
    caches = allocate(plan)
    assert caches["f"].shape == cache_shape(6, 4, 2, 8)
    caches["w"].fill_(7)
    for block in (1, 3, 5):
        caches["f"][block] = block
    for block in (1, 3, 5):
        assert (caches["f"][block] == block).all()
    for block in (0, 2, 4):
        assert (caches["w"][block] == 7).all()


def test_layers_of_unequal_size_need_blocks_first() -> None:
    plan = plan_kv_cache({"f": full(heads=2), "w": window(heads=5)}, num_blocks=6)
    with pytest.raises(ConfigError, match="cannot share a tensor"):
        allocate_kv_caches(plan, device="cpu", cache_shape=lambda n, size, heads, dim: (2, n, size, heads, dim))


@pytest.mark.parametrize(
    ("name", "dtype", "row_size"),
    [
        ("fp8_e4m3", torch.float8_e4m3fn, 8),
        ("fp8_e5m2", torch.float8_e5m2, 8),
        ("int8", torch.int8, 8 + 4),
        ("int4", torch.uint8, 8 // 2 + 4),
    ],
)
def test_formats_narrower_than_the_network(name: str, dtype: torch.dtype, row_size: int) -> None:
    plan = plan_kv_cache({"f": full(dtype=name), "g": full(dtype=name)}, num_blocks=5)
    caches = allocate(plan)
    assert {(cache.dtype, cache.shape) for cache in caches.values()} == {(dtype, cache_shape(5, 4, 2, row_size))}
    assert sum(cache.nbytes for cache in caches.values()) == plan.total_bytes == 2 * 5 * 2 * 2 * 4 * row_size


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_tokens_are_copied_with_what_they_are_multiples_of(name: str) -> None:
    plan = plan_kv_cache({"f": full(dtype=name)}, num_blocks=5)
    caches = allocate_kv_caches(plan, device="cpu", cache_shape=kv_cache_shape)
    pair = torch.randn(2, 3, 2, 8) * torch.logspace(-2, 2, 3)[:, None, None]
    sources, targets = torch.tensor([5, 6, 11]), torch.tensor([4, 5, 18])  # 5 is read before it is written
    ops.write_kv_cache(pair[0], pair[1], caches["f"], sources)
    wanted = caches["f"].clone()
    ops.write_kv_cache(pair[0], pair[1], wanted, targets)
    copy_tokens(caches["f"], 4, sources, targets)
    assert torch.equal(caches["f"], wanted)


def test_a_format_must_exist_and_fit_the_head() -> None:
    with pytest.raises(ConfigError, match="no KV cache dtype 'int2'; choose one of float32, ") as caught:
        plan_kv_cache({"f": full(dtype="int2")}, num_blocks=4)
    assert caught.value.field == "kv_cache_dtype"
    with pytest.raises(ConfigError, match="even head dimension, and this model's is 7"):
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=7, dtype="int4").block_bytes  # noqa: B018


def test_the_backend_must_need_what_was_planned() -> None:
    plan = plan_kv_cache({"f": full()}, num_blocks=4)
    with pytest.raises(ConfigError, match="cache shape"):
        allocate_kv_caches(plan, device="cpu", cache_shape=lambda n, size, heads, dim: (n, size, heads, dim))


def test_unknown_kinds_of_cache_are_refused() -> None:
    plan = KVCachePlan(
        groups=(KVCacheGroup(spec=KVCacheSpec(block_size=4), layer_names=("state",)),),
        num_blocks=4,
        tensor_block_bytes=(64,),
    )
    with pytest.raises(ConfigError, match="no cache layout for KVCacheSpec"):
        allocate(plan)


@pytest.mark.parametrize(
    ("names", "message"),
    [(None, "pass layer_names"), (("layer.0", "other"), "different layers: layer.1, other")],
)
def test_layers_and_plan_must_speak_of_the_same(names: tuple[str, ...] | None, message: str) -> None:
    network = TinyNetwork((None, 3))
    with pytest.raises(ConfigError, match=message):
        ModelRunner(
            network,
            plan_kv_cache(network.specs(4), num_blocks=6),
            RunnerConfig(dtype="float32"),
            vocab_size=VOCAB_SIZE,
            cache_shape=cache_shape,
            layer_names=names,
        )
