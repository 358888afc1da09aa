"""Several engines of one model: which settings make which ranks, what each gets of the host, and the same tokens as of
one engine, also when engines die."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from quire import LLM, AsyncLLM, ConfigError, QuireConfig, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.parallel.data_parallel import engine_ranks
from quire.parallel.rank_config import rank_config
from quire.parallel.tensor_parallel import config_of_ranks
from quire_engine import EnginePool, ProcessClient
from quire_interfaces import OutputKind, RequestOptions

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "structured_output_timeout": 120.0,
    "num_gpu_blocks_override": 512,
    "max_model_len": 512,
    "max_num_seqs": 16,
}
WORDS = StructuredOutputsParams(regex="([a-z]{2,9} ){60}")
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("Once upon a time", {"temperature": 0.0, "max_tokens": 400}),
    ("The sea was", {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 400}),
    ("A name:", {"structured_outputs": WORDS, "seed": 3, "max_tokens": 400}),
    ("Numbers are", {"temperature": 0.7, "seed": 8, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 400}),
    ("Three ways", {"temperature": 1.0, "seed": 11, "n": 3, "max_tokens": 400}),
    ("A penalty", {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2, "min_p": 0.05, "max_tokens": 400}),
]


def ranks_of(**settings: Any) -> tuple[int, int]:
    ranks = engine_ranks(QuireConfig.of(**settings).data_parallel)
    return ranks.first, ranks.size


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 1)),
        ({"data_parallel_size": 4}, (0, 4)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 4}, (0, 4)),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, (3, 1)),
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_external_lb": True}, (0, 1)),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, (0, 2)),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}
            | {"data_parallel_start_rank": 2},
            (2, 2),
        ),
    ],
)
def test_settings_make_ranks(settings: dict[str, Any], expected: tuple[int, int]) -> None:
    assert ranks_of(**settings) == expected


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "raise data_parallel_size"),
        (
            {"data_parallel_size": 4, "data_parallel_start_rank": 2},
            "add --headless where the server is on another host, or --data-parallel-hybrid-lb",
        ),
        ({"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, "wants data_parallel_size_local"),
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, "wants data_parallel_rank"),
        ({"data_parallel_size": 4, "data_parallel_rank": 4}, "less than data_parallel_size, which is 4, got 4"),
        ({"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_size_local": 2}, "-start-rank 1"),
        ({"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_start_rank": 2}, "leave it out"),
        ({"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_hybrid_lb": True}, "leave out one of them"),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}
            | {"data_parallel_start_rank": 3},
            "has none above 3",
        ),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "Ray does not place engines. Give other hosts"),
    ],
)
def test_contradictions_say_what_to_do(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        ranks_of(**settings)


def test_engines_of_one_host_get_parts_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.parallel.rank_config.split_cores", lambda setting, size: [((0, 2), 1), ((1, 3), 1)])
    config = QuireConfig.of(data_parallel_size=2, gpu_memory_utilization=0.6)
    parts = [rank_config(config, rank) for rank in range(2)]
    assert [part.runner.cpu_affinity for part in parts] == ["0,2", "1,3"]
    assert [part.runner.num_threads for part in parts] == [1, 1]
    assert [part.model.gpu_memory_utilization for part in parts] == [0.3, 0.3]
    asked = rank_config(QuireConfig.of(num_threads=3, data_parallel_size=2), 1)
    assert (asked.runner.num_threads, asked.runner.cpu_affinity) == (3, "none"), "more threads than cores"
    gpus = [rank_config(QuireConfig.of(device="cuda", data_parallel_size=2), rank) for rank in range(2)]
    assert [part.runner.device for part in gpus] == ["cuda:0", "cuda:1"]
    assert [part.model.gpu_memory_utilization for part in gpus] == [0.5, 0.5]
    alone = QuireConfig.of(data_parallel_size=4, data_parallel_rank=3)
    assert rank_config(alone, 3) == alone, "the host is its own"
    shared = QuireConfig.of(data_parallel_size=2, tensor_parallel_size=2)
    assert [rank_config(shared, rank).runner.num_threads for rank in range(2)] == [1, 1], "a core is a rank's at least"
    split = [((0, 2, 4, 6), 4), ((1, 3, 5, 7), 4)]
    monkeypatch.setattr("quire.parallel.rank_config.split_cores", lambda setting, size: split)
    parts = [config_of_ranks(rank_config(shared, rank)) for rank in range(2)]
    assert [(part.runner.num_threads, part.runner.cpu_affinity) for part in parts] == [(2, "none"), (2, "none")]
    staged = QuireConfig.of(data_parallel_size=2, pipeline_parallel_size=2)
    assert [rank_config(staged, rank).runner.num_threads for rank in range(2)] == [4, 4], "stages have the same cores"
    added = rank_config(config, 1)
    assert engine_ranks(added.data_parallel) == (1, 1)
    assert added.data_parallel.data_parallel_size == 2


def test_llm_runs_one_engine_and_says_what_runs_several() -> None:
    with pytest.raises(ConfigError, match="use AsyncLLM for data_parallel_size above 1"):
        LLM(data_parallel_size=2)


async def collect(llm: AsyncLLM, number: int, progress: list[int]) -> RequestOutput:
    prompt, fields = REQUESTS[number % len(REQUESTS)]
    params = SamplingParams(ignore_eos="structured_outputs" not in fields, **fields)
    async for output in llm.generate(prompt, params, RequestOptions(output_kind=OutputKind.CUMULATIVE)):
        progress.append(number)
        last = output
    return last


def compared(output: RequestOutput) -> list[Any]:
    return [(each.token_ids, each.text, each.logprobs, each.finish_reason) for each in output.outputs] + [
        output.prompt_logprobs
    ]


async def test_tokens_are_those_of_one_engine_also_when_engines_die() -> None:
    alone = AsyncLLM.start(QuireConfig.of(**SMALL))
    await alone.ready()
    assert isinstance(alone.client, ProcessClient)
    expected = [compared(await collect(alone, number, [])) for number in range(len(REQUESTS))]
    await alone.shutdown()
    llm = AsyncLLM.start(QuireConfig.of(data_parallel_size=2, max_restarts=20, **SMALL))
    await llm.ready()
    pool = llm.client
    assert isinstance(pool, EnginePool)
    for num_kills in range(2):
        progress: list[int] = []
        tasks = [asyncio.create_task(collect(llm, number, progress)) for number in range(2 * len(REQUESTS))]
        victim = pool.engines[num_kills % 2]
        async with asyncio.timeout(60):
            while victim.num_requests() < 3 or len(progress) < 20:
                await asyncio.sleep(0)
        num_moving = victim.num_requests()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        for number, task in enumerate(tasks):
            assert compared(await task) == expected[number % len(REQUESTS)], REQUESTS[number % len(REQUESTS)]
        assert num_moving >= 3
        assert pool.num_restarts == num_kills + 1
        async with asyncio.timeout(120):
            while any(engine.is_loading for engine in pool.engines.values()):
                await asyncio.sleep(0.01)
    await llm.shutdown()
