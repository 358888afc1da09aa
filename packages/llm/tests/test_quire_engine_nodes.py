"""Engines of another host, here another program of this one, in the pool of a server: chosen, lost, and back again."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, QuireConfig, SamplingParams
from quire.parallel.data_parallel import engine_ranks, pool_ranks
from quire.parallel.engine_nodes import HostsPool, NodeListener, serve_engines
from quire.parallel.rank_config import rank_config
from quire_interfaces import ConfigError, RequestOptions
from quire_testkit.fake_engine import FACTORY
from quire_testkit.fake_runner import expected_output

NODE = """
import sys, threading
from quire import QuireConfig
from quire.assemble import model_folder
from quire.parallel.engine_nodes import serve_engines
from quire.parallel.host_ranks import model_digest
from quire_testkit.fake_engine import FACTORY
config = QuireConfig.of(data_parallel_size=2, data_parallel_size_local=1, data_parallel_start_rank=1, headless=True,
                        data_parallel_rpc_port=int(sys.argv[1]), node_secret="of these hosts")
serve_engines(config, model_digest(model_folder(config)), threading.Event(), factory=(FACTORY, {"step_time_s": 0.01}))
"""
PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def start_node(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", NODE, str(port)], stderr=subprocess.DEVNULL)


async def tokens_of(llm: AsyncLLM, rank: int, on_token: Any = None) -> list[int]:
    token_ids: list[int] = []
    options = RequestOptions(data_parallel_rank=rank)
    async for output in llm.generate({"prompt_token_ids": PROMPT}, PARAMS, options):
        token_ids += output.outputs[0].token_ids
        if on_token is not None and len(token_ids) >= 10:
            on_token = on_token()
    return token_ids


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_lost_host_costs_its_requests_nothing_and_may_come_back() -> None:
    config = QuireConfig.of(
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_rpc_port=free_port(),
        node_secret="of these hosts",
        max_restarts=9,
        forward_output=False,
    )
    expected = expected_output(PROMPT, 200, request_seed=11)
    llm = AsyncLLM.start(config, factory=(FACTORY, {"step_time_s": 0.01}))
    pool = llm.client
    assert isinstance(pool, HostsPool)
    node = start_node(config.data_parallel.data_parallel_rpc_port)
    try:
        await llm.ready()
        assert await tokens_of(llm, 0) == expected
        (engine,) = children(node.pid)

        def kill_engine() -> None:
            assert pool.engines[1].num_requests() == 1, "the request runs on the other host"
            os.kill(engine, signal.SIGKILL)

        assert await tokens_of(llm, 1, kill_engine) == expected
        await until(lambda: not pool.engines[1].is_loading)
        assert children(node.pid) != [engine]

        def kill_host() -> None:
            assert pool.engines[1].num_requests() == 1
            node.kill()

        (engine,) = children(node.pid)
        assert await tokens_of(llm, 1, kill_host) == expected
        node.wait()
        assert pool.engines[1].is_loading, "it waits for its host"
        assert await tokens_of(llm, 1) == expected, "on the engine that is left"
        await until(lambda: not Path(f"/proc/{engine}/cmdline").exists() or not _cmdline(engine))
        node = start_node(config.data_parallel.data_parallel_rpc_port)
        await until(lambda: not pool.engines[1].is_loading)
        before = pool.engines[1].last_stats.num_generation_tokens_total
        assert await tokens_of(llm, 1) == expected
        assert (await pool.engines[1].stats()).num_generation_tokens_total >= before + 200
        assert (await pool.engines[1].ping()) < 60
    finally:
        await llm.shutdown()
        node.kill()
        node.wait()


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def free_port() -> int:
    listener = NodeListener("127.0.0.1", 0, b"x", silence_s=5.0, digest=lambda: "")
    listener.open()
    listener.close()
    return listener.port


def node_config(port: int, **settings: Any) -> QuireConfig:
    values = {"data_parallel_size": 2, "data_parallel_start_rank": 1, "headless": True, **settings}
    return QuireConfig.of(data_parallel_rpc_port=port, **values)


def test_a_host_with_another_model_or_another_ones_rank_or_secret_is_refused() -> None:
    listener = NodeListener("127.0.0.1", 0, b"secret", silence_s=5.0, digest=lambda: "ours")
    listener.open()
    stop = threading.Event()
    try:
        with pytest.raises(ConfigError, match="other files of the model"):
            serve_engines(node_config(listener.port, node_secret="secret"), "theirs", threading.Event())
        with pytest.raises(ConfigError, match="does not know this host's secret"):
            serve_engines(node_config(listener.port, node_secret="wrong"), "ours", threading.Event())
        first = threading.Thread(
            target=serve_engines, args=(node_config(listener.port, node_secret="secret"), "ours", stop)
        )
        first.start()
        while not listener.ranks():
            stop.wait(0.01)
        with pytest.raises(ConfigError, match="another host has the engine of rank 1"):
            serve_engines(node_config(listener.port, node_secret="secret"), "ours", threading.Event())
        stop.set()
        first.join()
    finally:
        listener.close()


def test_what_each_host_has() -> None:
    config = QuireConfig.of(data_parallel_size=4, data_parallel_size_local=1)
    assert engine_ranks(config.data_parallel) == (0, 1)
    assert pool_ranks(config.data_parallel) == (0, 4)
    none = dataclasses.replace(config.data_parallel, data_parallel_size_local=0)
    assert (engine_ranks(none), pool_ranks(none)) == ((0, 0), (0, 4))
    node = node_config(1, data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)
    assert engine_ranks(node.data_parallel) == (2, 2)
    assert rank_config(node, 3).data_parallel.data_parallel_rank == 3
    assert engine_ranks(node_config(1, data_parallel_size=4).data_parallel) == (1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_parallel_start_rank": 2}, "are no ranks of data_parallel_size 2"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1}, "leave out one"),
        ({"data_parallel_rank": 1}, "leave out one"),
    ],
)
def test_settings_of_a_host_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_ranks(node_config(1, **settings).data_parallel)
