"""Ranks that share a model on devices: each has its own, they talk by NCCL, and give the tokens of one rank."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_pretended_devices import Notes, pretended_devices
from test_quire_lora_experts import network
from test_quire_tensor_parallel import children

from quire import LLM, AsyncLLM, SamplingParams
from quire.config import QuireConfig
from quire.parallel.pipeline_parallel import num_steps_in_flight
from quire.parallel.rank_config import rank_config
from quire.parallel.tensor_parallel import devices_of_host, on_device_of_rank
from quire.plan import make_plan
from quire_demo_model import checkpoint_path
from quire_interfaces import ConfigError
from quire_models import ModelConfig

SETTINGS: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64, "num_threads": 1, "dtype": "float32"}
PROMPTS = ["The capital of France is", "one two three one two three one two"]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notes]:
    yield from pretended_devices(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("experts") / "model"
    network("MixtralForCausalLM", folder)
    return str(folder)


def tokens(llm: LLM) -> list[Any]:
    found = []
    for params in (SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1, seed=7, max_tokens=8)):
        found += [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return found


@pytest.fixture(scope="module")
def expected(experts_folder: str) -> dict[str | None, list[Any]]:
    """By a model, the tokens of one rank on the CPU."""
    found: dict[str | None, list[Any]] = {}
    for model in (None, experts_folder):
        with LLM(model, **SETTINGS) as alone:
            found[model] = tokens(alone)
    return found


def test_ranks_on_devices_keep_blocks_in_the_host_memory_of_each(
    expected: dict[str | None, list[Any]], notes: Notes
) -> None:
    with LLM(device="pretended", tensor_parallel_size=2, kv_offloading_size=0.01, **SETTINGS) as shared:
        assert tokens(shared) == expected[None]
        shared.reset_prefix_cache()
        assert tokens(shared) == expected[None]


@pytest.mark.parametrize(
    ("sizes", "of_experts", "called"),
    [
        ({"tensor_parallel_size": 2}, False, {"_allgather_base", "allreduce"}),
        ({"pipeline_parallel_size": 2}, False, {"send", "recv"}),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, True, {"alltoall_base"}),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, False, {"alltoall_base"}),
    ],
    ids=["tp", "pp", "ep", "dcp"],
)
def test_ranks_on_devices_give_the_tokens_of_one(
    expected: dict[str | None, list[Any]],
    experts_folder: str,
    notes: Notes,
    sizes: dict[str, int],
    of_experts: bool,
    called: set[str],
) -> None:
    model = experts_folder if of_experts else None
    with LLM(model, device="pretended:1", **sizes, **SETTINGS) as shared:
        pids = [each["pid"] for each in shared.collective_rpc("rank_info")]
        assert tokens(shared) == expected[model]
    assert notes.of(pids, "device") == [{"1"}, {"2"}]
    assert called <= set.union(*notes.of(pids, "nccl"))


def test_a_rank_that_is_killed_costs_no_token(notes: Notes) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)

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
        llm = AsyncLLM(QuireConfig.of(tensor_parallel_size=2, device="pretended", **SETTINGS))
        try:
            await llm.ready()
            first = llm.client.pid
            expected = await run(llm, kills=False)
            assert await run(llm, kills=True) == expected
            assert llm.client.pid != first
        finally:
            await llm.shutdown()

    asyncio.run(both())


def test_the_plan_has_the_memory_of_the_fullest_device(notes: Notes) -> None:
    model = ModelConfig.from_path(checkpoint_path())
    settings = {"max_model_len": 128, "tensor_parallel_size": 2}
    plan = make_plan(QuireConfig.of(device="pretended", **settings), model)
    assert plan.free_bytes == 3 << 30
    assert any("each has a device of its own" in each for each in plan.notes)
    staged = make_plan(
        QuireConfig.of(device="pretended:2", pipeline_parallel_size=2, **settings | {"tensor_parallel_size": 1}), model
    )
    assert staged.free_bytes == 2 << 32, "of all stages together"


def test_too_few_devices_are_an_error_with_their_number(notes: Notes) -> None:
    config = QuireConfig.of(device="pretended:1", tensor_parallel_size=2, pipeline_parallel_size=2, max_model_len=128)
    with pytest.raises(ConfigError, match="takes 4 devices here, pretended:1 to pretended:4, and there are 4: take"):
        make_plan(config, ModelConfig.from_path(checkpoint_path()))


def test_each_rank_has_a_device_behind_the_first() -> None:
    config = QuireConfig.of(device="cuda:2", tensor_parallel_size=2, pipeline_parallel_size=2)
    assert devices_of_host(config) == ["cuda:2", "cuda:3", "cuda:4", "cuda:5"]
    assert [on_device_of_rank(config, rank).runner.device for rank in (0, 3)] == ["cuda:2", "cuda:5"]
    spread = QuireConfig.of(device="cuda", tensor_parallel_size=4, nnodes=2)
    assert [on_device_of_rank(spread, rank).runner.device for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    on_cpus = QuireConfig.of(tensor_parallel_size=2)
    assert [on_device_of_rank(on_cpus, rank).runner.device for rank in range(2)] == ["cpu", "cpu"]
    assert num_steps_in_flight(config) == 2, "stages do not share a device"


def test_engines_have_as_many_devices_as_ranks() -> None:
    config = QuireConfig.of(device="cuda", data_parallel_size=2, tensor_parallel_size=2)
    engines = [rank_config(config, rank) for rank in range(2)]
    assert [devices_of_host(each) for each in engines] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert [each.model.gpu_memory_utilization for each in engines] == [config.model.gpu_memory_utilization] * 2


def test_gpus_that_are_not_here_are_planned_for_one_by_one() -> None:
    model, free = ModelConfig.from_path(checkpoint_path()), 1 << 33
    config = QuireConfig.of(device="cuda", tensor_parallel_size=2, max_model_len=128)
    assert make_plan(config, model, free_bytes=free).free_bytes == free


def test_ray_places_no_ranks_on_devices() -> None:
    config = QuireConfig.of(device="cuda", tensor_parallel_size=2, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match="Ray places ranks on CPUs only; take mp"):
        make_plan(config, ModelConfig.from_path(checkpoint_path()), free_bytes=1 << 33)
