"""The manager keeps the contract of `BlockAllocator`, under every hash algorithm."""

from __future__ import annotations

import pytest

from quire_interfaces import BlockAllocator, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_testkit.conformance.block_allocator import BlockAllocatorSuite


class TestKVCacheManager(BlockAllocatorSuite):
    algorithm: str

    @pytest.fixture(autouse=True, params=["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
    def _algorithm(self, request: pytest.FixtureRequest) -> None:
        self.algorithm = request.param

    def make_allocator(
        self,
        *,
        num_usable_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        enable_prefix_caching: bool = True,
        enable_events: bool = False,
    ) -> BlockAllocator:
        specs: dict[str, KVCacheSpec] = {}
        for i, window in enumerate(windows):
            if window is None:
                spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="bfloat16")
            else:
                spec = SlidingWindowSpec(
                    block_size=block_size, num_kv_heads=1, head_dim=8, dtype="bfloat16", sliding_window=window
                )
            specs[f"layers.{i}"] = spec
        config = KVCacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            prefix_caching_hash_algo=self.algorithm,
            enable_kv_cache_events=enable_events,
        )
        return KVCacheManager(plan_kv_cache(specs, num_blocks=num_usable_blocks + 1), config)
