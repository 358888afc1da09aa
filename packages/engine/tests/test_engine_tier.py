"""An engine whose KV cache has a tier: loads and stores ride along with the steps, through failures and to the end."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from quire_engine import CoreLoop, EngineConfig, EngineCore, EngineInfo, EngineParts
from quire_engine.messages import ClientMessage, CoreMessage, EngineStopped, Outputs, Shutdown
from quire_interfaces import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    ModelRunnerOutput,
    Request,
    SamplingParams,
    SchedulerOutput,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager
from quire_scheduler import KVTransfers, Scheduler, SchedulerConfig
from quire_testkit.conformance.engine_client import make_message
from quire_testkit.fake_runner import FakeExecutor, expected_output
from quire_testkit.memory_tier import MemoryConnector, MemoryTier, TieredFakeRunner

BLOCK = 4


def make_parts(tier: MemoryTier, num_blocks: int = 40) -> tuple[EngineParts, TieredFakeRunner]:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="bfloat16")
    group = KVCacheGroup(spec=spec, layer_names=("fake",))
    plan = KVCachePlan(groups=(group,), num_blocks=num_blocks + 1, tensor_block_bytes=(spec.block_bytes,))
    connector = MemoryConnector(tier)
    cache = KVCacheManager(plan, KVCacheConfig(block_size=BLOCK), on_computed=connector.offer)
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=6, max_model_len=128)
    scheduler = Scheduler(config, cache, rules=[KVTransfers(cache, connector)])
    runner = TieredFakeRunner(tier, num_rows=6, block_sizes=(BLOCK,), num_blocks=num_blocks + 1)
    info = EngineInfo(max_model_len=128, vocab_size=1000)
    return EngineParts(
        scheduler=scheduler, executor=FakeExecutor(runner), info=info, check_integrity=cache.check_integrity
    ), runner


def make_request(request_id: str, prompt: list[int], max_tokens: int = 6) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, seed=0, max_tokens=max_tokens
    )


def run(core: EngineCore, *requests: Request) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add_request(request)
    for _ in range(2000):
        if not core.has_requests():
            return tokens
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    raise AssertionError("the requests do not end")


def config(depth: int) -> EngineConfig:
    return EngineConfig(async_scheduling=depth > 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_orderly_end_stores_what_is_left(depth: int) -> None:
    tier = MemoryTier(max_stores=1)
    parts, _ = make_parts(tier)
    core = EngineCore(parts, config(depth))
    run(core, make_request("r", list(range(41))))
    assert len(tier.blocks) < 46 // BLOCK
    core.flush()
    assert len(tier.blocks) == 46 // BLOCK
    assert not core.has_work()
    core.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_loops_shutdown_stores_what_is_left_and_the_next_engine_finds_it(depth: int) -> None:
    tier = MemoryTier(max_stores=1)

    def serve() -> tuple[list[int], int]:
        turns: list[list[ClientMessage]] = [[make_message("r", list(range(41)), 6)]]
        sent: list[CoreMessage] = []

        class Inbox:
            def receive(self, timeout_s: float) -> list[ClientMessage]:
                return turns.pop(0) if turns else [Shutdown(drain_s=30.0)]

        CoreLoop(EngineCore(make_parts(tier)[0], config(depth)), Inbox(), sent.append).run()
        assert isinstance(sent[-1], EngineStopped)
        outputs = [output for message in sent if isinstance(message, Outputs) for output in message.outputs]
        return [token for output in outputs for token in output.new_token_ids], outputs[-1].num_cached_tokens

    first, num_cached = serve()
    assert num_cached == 0
    assert len(tier.blocks) == 46 // BLOCK
    assert serve() == (first, 40)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_raises_loses_no_transfer(depth: int) -> None:
    tier = MemoryTier()
    parts, _ = make_parts(tier)
    core = EngineCore(parts, config(depth))
    prompts = [list(range(start, start + 22)) for start in (0, 100, 200)]
    run(core, *[make_request(f"before{i}", prompt) for i, prompt in enumerate(prompts)])
    core.flush()
    core.close()

    parts, runner = make_parts(tier)
    core = EngineCore(parts, config(depth))
    runner.raise_on.add("bad")
    requests = [make_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    tokens = run(core, requests[0], make_request("bad", [1, 2, 3]), *requests[1:])
    for request, prompt in zip(requests, prompts, strict=True):
        assert tokens[request.request_id] == expected_output(prompt, 6, request_seed=0)
    assert core.stats().external_prefix_cache_hit_tokens_total == 3 * 20
    assert parts.check_integrity is not None
    parts.check_integrity()
    core.collect_all()
    assert core.stats().kv_cache_usage == 0


def test_a_device_that_hangs_does_not_hold_up_the_end() -> None:
    tier = MemoryTier(max_stores=1)
    parts, _ = make_parts(tier)

    class Hanging(FakeExecutor):
        is_hanging = False

        def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
            return Future() if self.is_hanging else super().execute(output)

    executor = Hanging(parts.executor.runner)  # type: ignore[attr-defined]
    parts.executor = executor
    core = EngineCore(parts, config(0))
    run(core, make_request("r", list(range(41))))
    executor.is_hanging = True
    start_s = time.monotonic()
    core.flush()
    core.close()
    assert time.monotonic() - start_s > 1.5
