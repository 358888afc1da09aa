"""Steps with prompts by graphs: the tokens of steps kernel by kernel, however prompts are cut and rows come and go.

The graphs are recorded operations on the CPU, as in `test_runner_graphs.py`: a replay knows of a step only the numbers
that are written before it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from runner_graph_network import add_torch_networks
from runner_harness import make_request, random_model

from quire_interfaces import ModelRunnerOutput, Request, SchedulerOutput
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_models import DecoderLM
from quire_runner import ModelRunner, RunnerConfig
from quire_sampling import SampleMode
from quire_scheduler import Scheduler, SchedulerConfig
from quire_testkit.recorded_graph import record_graph

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 40}


@pytest.fixture(autouse=True)
def _only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    add_torch_networks(monkeypatch, with_prompts=True)


def requests(seed: int, *, sampled: bool) -> list[Request]:
    """Prompts shorter and longer than a step, which begin while others decode."""
    rng = random.Random(seed)
    return [
        make_request(
            str(i), [rng.randrange(101) for _ in range(length)], max_tokens=rng.randint(2, 9), seed=i,
            **({"temperature": 0.9, "top_p": 0.9} if sampled and i % 2 else {}),
        )
        for i, length in enumerate((2, 9, 70, 30, 1, 70, 7, 8))
    ]  # fmt: skip


def run_backwards(runner: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
    """The step with its rows the other way round, so that one whose prompt goes on may stand before others."""
    turned = replace(
        output, rows=output.rows[::-1], request_ids=output.request_ids[::-1], samples=output.samples[::-1],
        num_computed_tokens=output.num_computed_tokens[::-1], num_scheduled_tokens=output.num_scheduled_tokens[::-1],
    )  # fmt: skip
    result = runner.run(turned)
    return replace(result, sampled_token_ids=result.sampled_token_ids[::-1])


def run(
    model: DecoderLM, several: list[Request], *, backwards: bool = False, **config: Any
) -> tuple[dict[str, list[int]], ModelRunner, int]:
    """Tokens of each request, the runner, and how often the network ran behind the captures."""
    plan = plan_kv_cache(model.config.kv_cache_specs(4, "float32"), num_blocks=80)
    runner = ModelRunner.for_model(model, plan, RunnerConfig(**LIMITS, **config), capture=record_graph)
    runner.warm_up(capture_s=1e9)
    num_forwards = 0
    forward = model.forward

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        return forward(*args, **named)

    model.forward = counted  # type: ignore[method-assign]
    scheduler = Scheduler(
        SchedulerConfig(**LIMITS), KVCacheManager(plan, KVCacheConfig(block_size=4, enable_prefix_caching=False))
    )
    for request in several[:2]:
        scheduler.add_request(request)
    waiting = several[2:]
    while scheduler.has_requests():
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(output, run_backwards(runner, output) if backwards else runner.run(output))
        if waiting:
            scheduler.add_request(waiting.pop(0))
    del model.forward
    return {request.request_id: request.output_token_ids for request in several}, runner, num_forwards


@pytest.mark.parametrize(
    ("family", "sampled", "backwards"), [("qwen3", False, False), ("qwen3", True, True), ("mistral", True, False)]
)
def test_tokens_are_those_of_steps_kernel_by_kernel(family: str, sampled: bool, backwards: bool) -> None:
    model = random_model(family)
    alone, runner, _ = run(model, requests(3, sampled=sampled), enforce_eager=True)
    assert runner.graphs is None
    got, runner, num_forwards = run(model, requests(3, sampled=sampled), backwards=backwards)
    captured = runner._captured
    assert captured is not None
    assert captured.mixed is not None
    assert captured.graphs.failure is captured.mixed.graphs.failure is None
    assert set(captured.mixed.graphs.captured) == {(64, SampleMode.ARGMAX), (64, SampleMode.SAMPLED)}
    assert num_forwards == 0  # every step is a replay
    assert got == alone
    assert all(got.values())


def test_steps_that_want_more_run_kernel_by_kernel() -> None:
    several = requests(5, sampled=False)
    several[0] = make_request("0", [1, 2, 3, 4, 5], max_tokens=5, repetition_penalty=1.3)
    several[1] = make_request("1", [1, 2, 3, 4, 5], max_tokens=5, prompt_logprobs=1)
    model = random_model("qwen3")
    alone, _, _ = run(model, [*several], enforce_eager=True)
    again = requests(5, sampled=False)
    again[:2] = [
        make_request("0", [1, 2, 3, 4, 5], max_tokens=5, repetition_penalty=1.3),
        make_request("1", [1, 2, 3, 4, 5], max_tokens=5, prompt_logprobs=1),
    ]
    got, _, num_forwards = run(model, again)
    assert num_forwards > 0
    assert got == alone


def test_none_are_captured_where_they_are_switched_off() -> None:
    model = random_model("qwen3")
    _, runner, num_forwards = run(model, requests(3, sampled=False), cuda_graph_mixed_tokens=0)
    assert runner._captured is not None
    assert runner._captured.mixed is None
    assert num_forwards > 0


def test_sizes() -> None:
    assert RunnerConfig(max_num_batched_tokens=512, max_model_len=4096).mixed_graph_sizes == tuple(range(64, 513, 64))
    assert RunnerConfig(max_num_batched_tokens=100, max_model_len=4096).mixed_graph_sizes == (64, 128)
    assert RunnerConfig(max_model_len=100).mixed_graph_sizes == (64,)
    assert RunnerConfig(enforce_eager=True).mixed_graph_sizes == ()
    assert RunnerConfig(cuda_graph_mixed_tokens=0).mixed_graph_sizes == ()
