"""Engines whose pipeline stages are processes: beside tensor parallel ranks, and beyond a stage's death."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.config import QuireConfig
from quire.parallel.pipeline_parallel import num_steps_in_flight
from quire.parallel.tensor_parallel import config_of_ranks
from quire.plan import make_plan
from quire.stage_notes import stage_notes
from quire_demo_model import checkpoint_path
from quire_interfaces import ConfigError
from quire_models import ModelConfig

SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 1}
PROMPTS = ["The capital of France is", "one two three", "Hello", "a b c d"]


def children(pid: int) -> list[int]:
    """Processes that run a rank and were started by a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for task in tasks for child in task.read_text().split()]
    return [each for each in pids if b"quire_distributed.worker" in Path(f"/proc/{each}/cmdline").read_bytes()]


def answers(llm: LLM) -> list[Any]:
    """Tokens and log probabilities."""
    params = SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=24, logprobs=2)
    return [
        (each.token_ids, [{token: one.logprob for token, one in at.items()} for at in each.logprobs or ()])
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
        for each in output.outputs
    ]


def test_tensors_and_layers_are_shared_by_processes() -> None:
    with LLM(**SETTINGS) as alone:
        expected = answers(alone)
    with LLM(tensor_parallel_size=2, pipeline_parallel_size=2, **SETTINGS) as shared:
        assert len(children(os.getpid())) == 3
        assert answers(shared) == expected
    assert children(os.getpid()) == []


@pytest.mark.parametrize(
    ("settings", "num_threads", "num_steps"),
    [
        ({}, 8, 1),  # stages have the same cores
        ({"num_threads": 4}, 4, 2),
        ({"num_threads": 1}, 1, 2),  # there are two stages
        ({"num_threads": 5}, 5, 1),
        ({"tensor_parallel_size": 2}, 4, 1),
        ({"tensor_parallel_size": 2, "num_threads": 2}, 2, 2),
        ({"data_parallel_size": 2, "num_threads": 4}, 4, 1),
        ({"num_threads": 100}, 100, 1),
        ({"nnodes": 2}, 8, 2),  # a stage on each host
        ({"nnodes": 2, "tensor_parallel_size": 4}, 2, 2),
        ({"nnodes": 4, "tensor_parallel_size": 4}, 4, 2),  # two ranks on each host
    ],
)
def test_as_many_steps_are_on_their_way_as_there_are_cores_for(
    settings: dict[str, Any], num_threads: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = config_of_ranks(QuireConfig.of(pipeline_parallel_size=2, **settings))
    assert (config.runner.num_threads, num_steps_in_flight(config)) == (num_threads, num_steps)


def test_stages_with_the_same_cores_take_all_requests_in_a_step() -> None:
    settings = SETTINGS | {"num_threads": len(os.sched_getaffinity(0))}
    with LLM(**settings) as alone, LLM(pipeline_parallel_size=2, **settings) as staged:
        assert answers(staged) == answers(alone)


def test_a_stage_that_is_killed_costs_no_token() -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=100, ignore_eos=True)

    async def run(llm: AsyncLLM, prompt: str, *, kills: bool = False) -> list[int]:
        token_ids: list[int] = []
        async for output in llm.generate(prompt, params):
            token_ids += output.outputs[0].token_ids
            if kills and len(token_ids) >= 10:
                kills = False
                os.kill(children(llm.client.pid)[-1], signal.SIGKILL)
        return token_ids

    async def both() -> None:
        llm = AsyncLLM(QuireConfig.of(pipeline_parallel_size=3, **SETTINGS))
        try:
            await llm.ready()
            first = llm.client.pid
            expected = [await run(llm, prompt) for prompt in PROMPTS]
            found = await asyncio.gather(*(run(llm, prompt, kills=prompt == "Hello") for prompt in PROMPTS))
            assert found == expected
            assert llm.client.pid != first
        finally:
            await llm.shutdown()

    asyncio.run(both())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"async_scheduling": True}, "async_scheduling does not go with pipeline_parallel_size 2"),
        ({"distributed_executor_backend": "uni"}, "one process, not the 2 of pipeline_parallel_size; take mp"),
        ({"pipeline_parallel_size": 6}, "pipeline_parallel_size is 6, and the network has 5 layers"),
    ],
)
def test_what_stages_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    config = QuireConfig.of(**({"pipeline_parallel_size": 2, "max_model_len": 256} | settings))
    with pytest.raises(ConfigError, match=message):
        make_plan(config, ModelConfig.from_path(checkpoint_path()))


def test_the_plan_says_what_each_stage_has() -> None:
    model = ModelConfig.from_path(checkpoint_path())
    config = QuireConfig.of(pipeline_parallel_size=2, max_model_len=256, num_gpu_blocks_override=64)
    plan = make_plan(config, model, free_bytes=1 << 33)
    alone = make_plan(QuireConfig.of(max_model_len=256, num_gpu_blocks_override=64), model, free_bytes=1 << 33)
    assert plan.ledger_bytes["weights: MLP"] == alone.ledger_bytes["weights: MLP"]
    assert plan.ledger_bytes["KV cache"] == alone.ledger_bytes["KV cache"]
    _, first, last = stage_notes(config, model, plan)
    assert first.startswith("stage 0: layers 0 to 2, embedding; weights ")
    assert last.startswith("stage 1: layers 3 to 4, final norm and LM head; weights ")
    drafting = QuireConfig.of(
        pipeline_parallel_size=2, max_model_len=256, num_gpu_blocks_override=64, speculative_method="draft_model"
    )
    *_, last = stage_notes(drafting, model, make_plan(drafting, model, free_bytes=1 << 33))
    assert "final norm and LM head, what drafts; weights " in last


def test_stages_of_several_hosts_have_the_memory_of_all() -> None:
    """Each host has as much as this one."""
    model = ModelConfig.from_path(checkpoint_path())

    def budget(**settings: Any) -> int:
        config = QuireConfig.of(pipeline_parallel_size=2, max_model_len=256, **settings)
        return make_plan(config, model, free_bytes=1 << 30).free_bytes

    assert (budget(), budget(nnodes=2)) == (1 << 30, 1 << 31)
    assert budget(nnodes=2, tensor_parallel_size=2) == 1 << 30  # two ranks on each host
