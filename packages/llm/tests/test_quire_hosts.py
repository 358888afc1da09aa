"""One model on the ranks of several hosts, here two programs of one: the tokens of one process, also after faults."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.config import QuireConfig
from quire.plan import make_plan
from quire_demo_model import checkpoint_path
from quire_interfaces import ConfigError, EngineDeadError
from quire_models import ModelConfig

SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 128, "num_threads": 1}
PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)
NODE = """
import sys, threading
from pathlib import Path
from quire import QuireConfig
from quire.parallel.host_ranks import run_node
folder, port = Path(sys.argv[1]), int(sys.argv[2])
config = QuireConfig.of(model=str(folder), pipeline_parallel_size=2, nnodes=2, node_rank=1, master_port=port,
                        headless=True, node_secret="of these hosts", num_threads=1)
run_node(config, folder, threading.Event())
"""


def start_node(folder: Path, port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", NODE, str(folder), str(port)], stderr=subprocess.PIPE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


async def tokens_of(llm: AsyncLLM, on_token: Any = None) -> list[int]:
    token_ids: list[int] = []
    async for output in llm.generate("The capital of France is", PARAMS):
        token_ids += output.outputs[0].token_ids
        if on_token is not None and len(token_ids) >= 10:
            on_token = on_token()
    return token_ids


def test_two_hosts_give_the_tokens_of_one_also_when_a_rank_is_killed() -> None:
    port = free_port()
    node = start_node(checkpoint_path(), port)

    def kill_rank() -> None:
        (rank,) = children(node.pid)
        os.kill(rank, signal.SIGKILL)

    async def run() -> None:
        alone = AsyncLLM(QuireConfig.of(**SETTINGS))
        try:
            await alone.ready()
            expected = await tokens_of(alone)
        finally:
            await alone.shutdown()
        hosts = QuireConfig.of(
            pipeline_parallel_size=2, nnodes=2, master_port=port, node_secret="of these hosts", **SETTINGS
        )
        llm = AsyncLLM(hosts)
        try:
            info = await llm.ready()
            assert info.choices["stages"].startswith("2, on 2 hosts")
            assert await tokens_of(llm, kill_rank) == expected
            assert llm.client.num_restarts == 1
            kill_rank()  # and one that is idle
            async with asyncio.timeout(60):
                while llm.client.num_restarts == 1:
                    await asyncio.sleep(0.01)
            assert await tokens_of(llm) == expected
            (rank,) = children(node.pid)
        finally:
            await llm.shutdown()
        deadline_s = time.monotonic() + 30
        while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        assert not Path(f"/proc/{rank}").exists()

    try:
        asyncio.run(run())
    finally:
        node.kill()
        node.communicate()


def test_a_host_with_another_model_is_refused_on_both_sides(tmp_path: Path) -> None:
    for path in checkpoint_path().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text((checkpoint_path() / "config.json").read_text() + "\n")
    port = free_port()
    node = start_node(tmp_path, port)
    llm = AsyncLLM(
        QuireConfig.of(tensor_parallel_size=2, nnodes=2, master_port=port, node_secret="of these hosts", **SETTINGS)
    )

    async def run() -> None:
        try:
            await llm.ready()
        finally:
            await llm.shutdown()

    with pytest.raises(EngineDeadError, match="node 1 has other files of the model than node 0"):
        asyncio.run(run())
    _, told = node.communicate(timeout=60)
    assert b"node 1 has other files of the model" in told
    assert node.returncode == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nnodes": 2, "node_rank": 2}, "node_rank 2 is none of nnodes 2"),
        ({"node_rank": 1}, "node_rank 1 is none of nnodes 1"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, "add --headless"),
        ({"nnodes": 2, "headless": True, "tensor_parallel_size": 2}, "leave out --headless"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "cannot be spread evenly over nnodes 2"),
        ({"nnodes": 2}, "1 ranks .* cannot be spread evenly"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "ray does not go with nnodes 2; mp does",
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size 2 does not go with"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "enable_prompt_embeds": True},
            "nnodes does not go with tensor_parallel_size 2: media and embeddings lie in the memory of node 0",
        ),
    ],
)
def test_settings_of_hosts_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(QuireConfig.of(max_model_len=256, **settings), ModelConfig.from_path(checkpoint_path()))
