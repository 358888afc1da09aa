"""Ranks that a real local Ray cluster places: the tokens of one process, and an actor that is killed. Needs Ray, which
is an extra: `uv pip install quire[ray]`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.config import QuireConfig

pytest.importorskip("ray", reason="Ray is not installed: ranks placed by Ray were NOT tried (extra `ray`)")

SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 1}
PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two nodes of Ray's on this host, in the first of which engines join: it has room for one actor, the other for
    two."""
    nodes = start_nodes()
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield
        finally:
            nodes.shutdown()


def start_nodes() -> Any:
    """Ray waits 30 s for its own processes, which a busy machine may need."""
    from ray.cluster_utils import Cluster

    for attempt in range(3):
        nodes = Cluster()
        try:
            nodes.add_node(num_cpus=1, include_dashboard=False)
            nodes.add_node(num_cpus=2)
            return nodes
        except Exception:
            nodes.shutdown()
            if attempt == 2:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The tokens of one process."""

    async def run() -> list[int]:
        alone = AsyncLLM(QuireConfig.of(**SETTINGS))
        try:
            await alone.ready()
            return await tokens_of(alone)
        finally:
            await alone.shutdown()

    return asyncio.run(run())


def actors() -> list[int]:
    """Processes of actors that run a rank, of every cluster of this host."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().startswith("ray::RankActor"):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


async def tokens_of(llm: AsyncLLM, on_token: Any = None) -> list[int]:
    token_ids: list[int] = []
    async for output in llm.generate("The capital of France is", PARAMS):
        token_ids += output.outputs[0].token_ids
        if on_token is not None and len(token_ids) >= 10:
            on_token = on_token()
    return token_ids


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"tensor_parallel_size": 2}, "ranks"),
        ({"pipeline_parallel_size": 2}, "stages"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "stages"),
    ],
    ids=["tp", "pp", "pp_tp"],
)
def test_ranks_placed_by_ray_give_the_tokens_of_one_also_when_an_actor_is_killed(
    sizes: dict[str, int], kind: str, expected: list[int]
) -> None:
    before = set(actors())

    def kill_actor() -> None:
        os.kill(max(set(actors()) - before), signal.SIGKILL)

    async def run() -> None:
        llm = AsyncLLM(QuireConfig.of(distributed_executor_backend="ray", **sizes, **SETTINGS))
        try:
            assert (await llm.ready()).choices[kind].startswith("2, placed by Ray")
            assert await tokens_of(llm, kill_actor) == expected
            assert llm.client.num_restarts == 1
        finally:
            await llm.shutdown()

    asyncio.run(run())
    deadline_s = time.monotonic() + 30
    while set(actors()) - before and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not set(actors()) - before
