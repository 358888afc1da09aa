"""Shared by the tests: a driver over the plain allocator, or over the real cache. `scheduler_traces` is importable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_interfaces import AdmissionRule, BlockAllocator, FullAttentionSpec
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.conformance.scheduler import BLOCK, Driver
from quire_testkit.fake_runner import FakeRunner
from quire_testkit.plain_blocks import PlainBlocks

sys.path.insert(0, str(Path(__file__).parent))

MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver() -> MakeDriver:
    def make(
        *,
        num_blocks: int = 64,
        depth: int = 0,
        prefix_cache: bool = False,
        rules: tuple[AdmissionRule, ...] = (),
        draft_accuracy: float = 0.5,
        num_forced_tokens: int = 0,
        **config: object,
    ) -> Driver:
        settings = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **config})
        allocator: BlockAllocator = PlainBlocks(num_blocks, BLOCK)
        if prefix_cache:
            spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="bfloat16")
            plan = plan_kv_cache({"layer": spec}, num_blocks=num_blocks + 1)
            allocator = KVCacheManager(plan, KVCacheConfig(block_size=BLOCK))
        runner = FakeRunner(
            num_rows=settings.max_num_seqs,
            block_sizes=(BLOCK,),
            num_blocks=num_blocks + 1,
            num_draft_tokens=settings.num_speculative_tokens,
            draft_accuracy=draft_accuracy,
            num_forced_tokens=num_forced_tokens,
        )
        return Driver(Scheduler(settings, allocator, rules=rules), runner, depth)

    return make
