"""Ranks that a real local Ray cluster places: the tokens of one process, and an actor that is killed. Needs Ray, which
is an extra: `uv pip install quire[ray]`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.config import QuireConfig

pytest.importorskip("ray", reason="Ray is not installed: ranks placed by Ray were NOT tried (extra `ray`)")

SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 1}
PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)


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


def test_ranks_placed_by_ray_give_the_tokens_of_one_also_when_an_actor_is_killed() -> None:
    before = set(actors())

    def kill_actor() -> None:
        (actor,) = set(actors()) - before
        os.kill(actor, signal.SIGKILL)

    async def run() -> None:
        alone = AsyncLLM(QuireConfig.of(**SETTINGS))
        try:
            await alone.ready()
            expected = await tokens_of(alone)
        finally:
            await alone.shutdown()
        llm = AsyncLLM(
            QuireConfig.of(tensor_parallel_size=2, distributed_executor_backend="ray", **SETTINGS),
        )
        try:
            assert (await llm.ready()).choices["ranks"].startswith("2, placed by Ray")
            assert await tokens_of(llm, kill_actor) == expected
            assert llm.client.num_restarts == 1
        finally:
            await llm.shutdown()

    asyncio.run(run())
    deadline_s = time.monotonic() + 30
    while set(actors()) - before and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not set(actors()) - before
