"""The networks of quire_models under the runner: each token equals that of a fresh pass over the whole sequence."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from runner_harness import FAMILIES, make_request, random_model

from quire_interfaces import Request
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_models import DecoderLM
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor
from quire_sampling import SamplingConfig
from quire_scheduler import Scheduler, SchedulerConfig
from quire_spec_decode import NgramDrafter


def run(
    model: DecoderLM, requests: list[Request], *, depth: int = 0, budget: int = 64, **more: Any
) -> dict[str, list[int]]:
    plan = plan_kv_cache(model.config.kv_cache_specs(4, "float32"), num_blocks=more.pop("num_blocks", 300))
    limits = {
        "max_num_seqs": 8,
        "max_model_len": 128,
        "max_num_batched_tokens": budget,
        "num_speculative_tokens": 3 if "drafter" in more else 0,
    }
    runner = ModelRunner.for_model(model, plan, RunnerConfig(**limits), **more)
    executor = ThreadedExecutor(runner) if depth > 0 else runner
    scheduler = Scheduler(SchedulerConfig(**limits), KVCacheManager(plan, KVCacheConfig(block_size=4)))
    for request in requests:
        scheduler.add_request(request)
    steps: deque[Any] = deque()
    while scheduler.has_requests():
        while len(steps) <= depth and (output := scheduler.schedule()) is not None:
            steps.append((output, executor.execute(output)))
        output, future = steps.popleft()
        scheduler.update(output, future.result(timeout=60))
    executor.close()
    return {request.request_id: request.output_token_ids for request in requests}


def requests() -> list[Request]:
    return [
        make_request(f"r{i}", [(7 * i + j * j) % 101 for j in range(5 + 9 * i)], max_tokens=16, seed=i, temperature=t)
        for i, t in enumerate([0.0, 0.8, 0.0, 1.1, 0.0])
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_situations_give_the_same_tokens(family: str) -> None:
    model = random_model(family)
    alone = {}
    for request in requests():
        alone |= run(model, [request])
    assert all(len(tokens) == 16 for tokens in alone.values())
    assert run(model, requests()) == alone
    assert run(model, requests(), budget=7) == alone
    assert run(model, requests(), depth=1, budget=16) == alone
    assert run(model, requests(), num_blocks=70, depth=1) == alone
    assert run(model, requests(), drafter=NgramDrafter(1, 3)) == alone


def test_tokens_are_those_of_whole_passes() -> None:
    """Without the cache's help: each next token from a one-step request that holds the whole sequence so far."""
    model = random_model("llama")
    request = requests()[2]
    tokens = run(model, [request])[request.request_id]
    known = list(request.prompt_token_ids)
    for token in tokens:
        step = make_request("one", known, max_tokens=1)
        assert run(model, [step])["one"] == [token]
        known.append(token)


def test_limits_of_the_sampler_are_passed_on() -> None:
    model = random_model("llama")
    request = make_request("r", [1, 2, 3], logprobs=3)
    result = run(model, [request], sampling_config=SamplingConfig(max_logprobs=2))
    assert result == {"r": []}
