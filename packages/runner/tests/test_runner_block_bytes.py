"""Blocks as bytes share memory with the caches, and go through a tier and back unchanged, whatever runs meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from runner_harness import FULL, HYBRID, Engine, TinyNetwork, cache_shape, make_request, reference_tokens

from quire_interfaces import ConfigError, FullAttentionSpec, KVCacheGroup, KVCachePlan
from quire_kv_cache import plan_kv_cache
from quire_runner import BlockBytes, allocate_kv_caches
from quire_scheduler import KVTransfers
from quire_testkit.memory_tier import MemoryConnector, MemoryTier, MemoryWorker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_the_caches_own_memory(dtype: torch.dtype) -> None:
    shape = {"block_size": 4, "num_kv_heads": 2, "dtype": str(dtype).removeprefix("torch.")}
    wide, narrow = FullAttentionSpec(**shape, head_dim=8), FullAttentionSpec(**shape, head_dim=4)
    # Two groups whose layers share tensors though their blocks differ in size.
    plan = KVCachePlan(
        groups=(KVCacheGroup(spec=wide, layer_names=("a", "b")), KVCacheGroup(spec=narrow, layer_names=("c",))),
        num_blocks=5,
        tensor_block_bytes=(wide.block_bytes, wide.block_bytes),
    )
    caches = allocate_kv_caches(plan, device="cpu", cache_shape=cache_shape)
    memory = BlockBytes(plan, caches)
    for name in ("a", "b", "c"):
        caches[name][:] = torch.randn(caches[name].shape)
    for group, names in enumerate((("a", "b"), ("c",))):
        for block in range(5):
            buffers = memory.buffers(group, block)
            for name, buffer in zip(names, buffers, strict=True):
                assert bytes(buffer) == caches[name][block].contiguous().view(torch.uint8).numpy().tobytes()
    (buffer,) = memory.buffers(1, 3)
    before = caches["a"][2].clone()
    buffer[:] = bytes(len(buffer))
    assert caches["c"][3].eq(0).all()
    assert caches["a"][2].equal(before)


def test_other_layouts_are_refused() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    plan = plan_kv_cache({"a": spec}, num_blocks=5)
    turned = torch.zeros(2, 5, 4, 2, 8)
    with pytest.raises(ConfigError, match="does not keep a block's bytes together") as caught:
        BlockBytes(plan, {"a": turned})
    assert caught.value.field == "kv_disk_path"
    with pytest.raises(ConfigError, match="does not keep a block's bytes together"):
        BlockBytes(plan, {"a": turned.transpose(0, 1)})


class TieredEngine(Engine):
    """An `Engine` whose KV cache has a tier behind it."""

    def __init__(self, tier: MemoryTier, network: TinyNetwork, **options: Any) -> None:
        connector = MemoryConnector(tier)
        super().__init__(
            network,
            make_transfer_worker=lambda memory: MemoryWorker(tier, memory),
            cache_options={"on_computed": connector.offer},
            make_transfers=lambda manager: KVTransfers(manager, connector),
            **options,
        )


@pytest.mark.parametrize("windows", [FULL, HYBRID])
@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_the_same_from_the_tier(windows: tuple[int | None, ...], depth: int) -> None:
    tier = MemoryTier()
    prompts = [random.Random(seed).choices(range(67), k=23 + seed) for seed in range(3)]
    first = TieredEngine(tier, TinyNetwork(windows), depth=depth)
    first.run(*[make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    first.close()
    assert tier.blocks

    network = TinyNetwork(windows)
    # Few blocks and small steps: loads, preemptions and decodes at the same time.
    engine = TieredEngine(tier, network, depth=depth, num_blocks=40, max_num_batched_tokens=7, max_num_seqs=3)
    requests = [
        *[make_request(f"again{i}", prompt, temperature=0.8, seed=i) for i, prompt in enumerate(prompts)],
        make_request("longer", prompts[0] + [5, 6, 7]),
        make_request("stranger", [1, 2, 3]),
    ]
    outcomes = engine.run(*requests)
    for request in requests:
        assert outcomes[request.request_id].token_ids == reference_tokens(network, request), request.request_id
    num_hits = engine.scheduler.stats().external_prefix_cache_hit_tokens_total
    # A window may have passed a block before its step's result came: then that block was never stored.
    assert num_hits >= 20 * 3 if windows == FULL else num_hits >= 20
    engine.close()
