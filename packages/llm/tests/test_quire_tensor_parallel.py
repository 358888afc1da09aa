"""An engine whose ranks are processes gives what one process gives, and outlives its ranks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_demo_model import adapter_paths, checkpoint_path
from quire_interfaces import ConfigError, RankDeadError
from quire_models import ModelConfig

SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "num_gpu_blocks_override": 128,
    "num_threads": 1,
    "speculative_method": "ngram",
    "speculative_adaptive": False,
    "num_speculative_tokens": 3,
}
PROMPTS = ["The capital of France is", "one two three one two three one two"]


def answers(llm: LLM) -> list[Any]:
    """Tokens and log probabilities of requests of many kinds."""
    found: list[Any] = []

    def ask(params: SamplingParams, **more: Any) -> None:
        for output in llm.generate(PROMPTS, params, **more):
            for each in output.outputs:
                logprobs = [{token: one.logprob for token, one in at.items()} for at in each.logprobs or ()]
                found.append((each.token_ids, logprobs, each.finish_reason))

    ask(SamplingParams(temperature=0, max_tokens=20, logprobs=3))
    ask(SamplingParams(temperature=0, max_tokens=20))  # its prompt is cached
    ask(SamplingParams(temperature=1.0, seed=7, n=2, max_tokens=12, logprobs=2))
    ask(
        SamplingParams(
            temperature=1.0,
            seed=3,
            max_tokens=24,
            structured_outputs=StructuredOutputsParams(regex="[a-z]{4} [0-9]{6}"),
        )
    )
    adapter = LoRARequest("demo-json", 1, str(adapter_paths()["demo-json"]))
    ask(SamplingParams(temperature=0, max_tokens=16, logprobs=1), lora_request=adapter)
    return found


def test_ranks_in_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    with LLM(**SETTINGS) as alone:
        expected = answers(alone)
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False}
    with LLM(tensor_parallel_size=2, profiler_config=profiler, **SETTINGS) as shared:
        infos = shared.collective_rpc("rank_info")
        assert [each["tp_rank"] for each in infos] == [0, 1]
        assert infos[0]["pid"] == os.getpid() != infos[1]["pid"]
        assert answers(shared) == expected
        shared.start_profile("both")
        shared.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        paths = list(map(Path, shared.stop_profile()))
    for rank, info in enumerate(infos):
        trace, operators = paths[2 * rank : 2 * rank + 2]
        assert trace.name.startswith(f"both_dp0_pp0_tp{rank}_rank{rank}.{info['pid']}.")
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert "aten::index_select" in names
        assert "aten::index_select" in operators.read_text()
    assert children(os.getpid()) == []


def children(pid: int) -> list[int]:
    """Processes that run a rank and were started by a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for task in tasks for child in task.read_text().split()]
    return [each for each in pids if b"quire_distributed.worker" in Path(f"/proc/{each}/cmdline").read_bytes()]


def test_a_rank_that_ends_before_it_joins_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankDeadError, match="rank 1 is gone: its process ended with exit status 1"):
        LLM(tensor_parallel_size=2, **SETTINGS)


def test_a_rank_that_is_killed_costs_no_token() -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=120, ignore_eos=True)

    async def run(llm: AsyncLLM, *, kills: bool) -> list[int]:
        token_ids: list[int] = []
        async for output in llm.generate(PROMPTS[0], params):
            token_ids += output.outputs[0].token_ids
            if kills and len(token_ids) >= 10:
                kills = False
                (rank,) = children(llm.client.pid)
                os.kill(rank, signal.SIGKILL)
        return token_ids

    async def both() -> None:
        llm = AsyncLLM(QuireConfig.of(tensor_parallel_size=2, **SETTINGS))
        try:
            await llm.ready()
            first = llm.client.pid
            expected = await run(llm, kills=False)
            assert await run(llm, kills=True) == expected
            assert llm.client.pid != first
            (rank,) = children(llm.client.pid)
        finally:
            await llm.shutdown()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not Path(f"/proc/{rank}").exists()

    asyncio.run(both())


def test_engines_of_several_ranks_share_a_host_and_outlive_a_rank() -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)

    async def run(llm: AsyncLLM, kills: bool) -> list[int]:
        token_ids: list[int] = []
        async for output in llm.generate(PROMPTS[0], params):
            token_ids += output.outputs[0].token_ids
            if kills and len(token_ids) >= 10:
                kills = False
                engines = llm.client.engines.values()
                (busy,) = [engine for engine in engines if engine.num_requests()]
                (rank,) = children(busy.pid)
                os.kill(rank, signal.SIGKILL)
        return token_ids

    async def both() -> None:
        llm = AsyncLLM(QuireConfig.of(tensor_parallel_size=2, data_parallel_size=2, **SETTINGS))
        try:
            await llm.ready()
            assert [len(children(engine.pid)) for engine in llm.client.engines.values()] == [1, 1]
            expected = await run(llm, kills=False)
            assert await run(llm, kills=True) == expected
            assert llm.client.num_restarts == 1
        finally:
            await llm.shutdown()

    asyncio.run(both())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_merge_after": 4}, "lora_merge_after does not go with tensor_parallel_size 2: .* set it to 0"),
        ({"async_scheduling": True}, "async_scheduling does not go with tensor_parallel_size 2"),
        ({"distributed_executor_backend": "uni"}, "uni is one process, not the 2 of tensor_parallel_size; take mp"),
    ],
)
def test_what_ranks_cannot_share_yet_is_refused(settings: dict[str, Any], message: str) -> None:
    config = QuireConfig.of(tensor_parallel_size=2, max_model_len=256, **settings)
    with pytest.raises(ConfigError, match=message):
        make_plan(config, ModelConfig.from_path(checkpoint_path()))


def test_an_unknown_executor_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ray \\(ranks are actors that Ray places\\)"):
        QuireConfig.of(distributed_executor_backend="slurm")


def test_the_plan_is_that_of_one_rank() -> None:
    model = ModelConfig.from_path(checkpoint_path())
    alone, rank = (
        make_plan(
            QuireConfig.of(tensor_parallel_size=size, max_model_len=256, num_gpu_blocks_override=64),
            model,
            free_bytes=1 << 33,
        )
        for size in (1, 2)
    )
    assert rank.ledger_bytes["weights: MLP"] * 2 == alone.ledger_bytes["weights: MLP"]
    assert rank.ledger_bytes["KV cache"] * 2 == alone.ledger_bytes["KV cache"]
    assert rank.ledger_bytes["weights: norms"] == alone.ledger_bytes["weights: norms"]
