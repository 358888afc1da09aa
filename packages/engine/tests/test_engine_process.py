"""The engine process: start-up failures explain themselves, deaths are noticed, orphans do not stay."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from quire_engine import EngineConfig, NullListener, ProcessClient
from quire_engine.child import describe_failure, load_factory
from quire_engine.process import explain_exit
from quire_interfaces import (
    ConfigError,
    EngineDeadError,
    FinishReason,
    OverloadedError,
    RequestError,
    SchedulerStats,
)
from quire_testkit.conformance.engine_client import collect, make_message
from quire_testkit.fake_engine import FACTORY
from quire_testkit.fake_runner import expected_output


async def start(
    factory_config: dict[str, Any] | None = None, *, factory: str = FACTORY, **settings: Any
) -> ProcessClient:
    settings.setdefault("max_restarts", 0)
    client = ProcessClient(factory, factory_config or {}, EngineConfig(forward_output=False, **settings))
    await client.ready()
    return client


async def wait_for_end(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("factory", "config", "told"),
    [
        ("quire_testkit.nowhere:f", {}, "quire_testkit.nowhere:f.*module:function"),
        ("quire_testkit.fake_engine:nothing", {}, "nothing"),
        ("no colon", {}, "no colon"),
        (FACTORY, {"fault": "the moon"}, "RuntimeError: asked to fail: the moon.*fake_engine_factory"),
        (FACTORY, {"num_blokcs": 3}, "num_blokcs"),
        (FACTORY, {"block_size": 3}, "block_size"),
        (FACTORY, {"fault": "exit"}, "(?s)exit status 7.*exits at the start as asked"),
    ],
)
async def test_a_failed_start_says_the_childs_own_cause(factory: str, config: dict[str, Any], told: str) -> None:
    # Who waited for the time of a start to be over would say that, and not the cause.
    client = ProcessClient(factory, config, EngineConfig(forward_output=False))
    with pytest.raises(EngineDeadError, match=told):
        await client.ready()
    with pytest.raises(EngineDeadError, match=told):
        client.check_health()
    await client.shutdown()


@pytest.mark.parametrize(("fault", "is_wrong_setting"), [("a setting", True), ("the moon", False)])
async def test_a_refused_setting_is_told_apart_from_another_failed_start(fault: str, is_wrong_setting: bool) -> None:
    factory = "quire_testkit.nowhere:f" if is_wrong_setting else FACTORY  # a ConfigError, and a RuntimeError
    client = ProcessClient(factory, {"fault": fault}, EngineConfig(forward_output=False))
    with pytest.raises(EngineDeadError) as caught:
        await client.ready()
    assert caught.value.is_wrong_setting is is_wrong_setting
    await client.shutdown()


async def test_a_start_that_takes_too_long_is_given_up() -> None:
    client = ProcessClient(FACTORY, {"fault": "hang"}, EngineConfig(startup_timeout_s=1.0))
    client.start()
    pid = client.pid
    with pytest.raises(EngineDeadError, match="startup_timeout_s=1"):
        await client.ready()
    assert pid is not None
    assert await wait_for_end(pid)
    await client.shutdown()


async def test_a_start_that_failed_before_anybody_waited() -> None:
    client = ProcessClient(FACTORY, {"fault": "early"}, EngineConfig(forward_output=False))
    client.start()
    assert client.pid is not None
    with suppress(ChildProcessError):  # the client has taken note of its end already
        os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineDeadError, match="asked to fail: early"):
        await client.ready()
    await client.shutdown()


async def test_shutdown_while_it_still_loads() -> None:
    """Neither for the end of the start nor for requests in flight, which would take longer than a test may."""
    client = ProcessClient(FACTORY, {"fault": "hang"}, EngineConfig(startup_timeout_s=3600, shutdown_timeout_s=3600))
    client.start()
    await client.shutdown()
    assert client.pid is not None
    assert await wait_for_end(client.pid)


async def test_progress_is_told_and_start_returns_at_once() -> None:
    seen: list[tuple[str, float]] = []
    client = ProcessClient(FACTORY, {}, EngineConfig(forward_output=False))
    client.on_progress = lambda stage, fraction: seen.append((stage, fraction))
    client.start()
    assert client.info is None
    info = await client.ready()
    assert await client.ready() == info
    assert seen == [("pretending to load", 0.5)]
    assert info.model == "fake"
    assert info.timings_s["engine_process"] > 0
    await client.shutdown()


async def test_a_death_at_run_time_is_noticed_when_it_happens() -> None:
    client = await start({"step_time_s": 0.005}, step_timeout_s=3600)  # no step that takes too long gives it away
    stream = client.open([make_message("r", [1], 900)])
    async for _ in stream:
        break
    call = asyncio.create_task(client.ping())
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"SIGKILL.*out of memory"):
        await collect(stream)
    with suppress(EngineDeadError):  # it may have been answered before
        await call
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.open([make_message("late", [1], 2)])
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await client.stats()
    await client.shutdown()


async def test_requests_go_on_after_a_restart_with_the_same_tokens() -> None:
    client = await start({"step_time_s": 0.003}, max_restarts=2)
    tasks = [asyncio.create_task(collect(client.open([make_message(f"r{i}", [i, i], 150, seed=i)]))) for i in range(12)]
    while (await client.stats()).num_generation_tokens_total < 12:
        await asyncio.sleep(0.002)
    first_pid = client.pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    await asyncio.sleep(0.05)
    late = asyncio.create_task(collect(client.open([make_message("late", [9], 40, seed=9)])))
    for i, task in enumerate(tasks):
        result = await task
        assert result[f"r{i}"] == (expected_output([i, i], 150, request_seed=i), FinishReason.LENGTH)
    assert (await late)["late"][0] == expected_output([9], 40, request_seed=9)
    assert client.num_restarts == 1
    assert client.pid != first_pid
    assert await client.check_integrity() is None
    await client.shutdown()


@pytest.mark.parametrize("rest", ["pause", "sleep"])
async def test_an_engine_that_rests_does_so_after_a_restart(rest: str) -> None:
    client = await start({"step_time_s": 0.003}, max_restarts=2)
    stream = client.open([make_message("r", [1], 60)])
    await anext(aiter(stream))
    await (client.pause() if rest == "pause" else client.sleep(0))
    with nullcontext() if rest == "pause" else pytest.raises(RequestError, match="wake it first"):
        await client.pause("keep")
    running = asyncio.create_task(collect(stream))
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while client.num_restarts == 0:
        await asyncio.sleep(0.01)
    assert await client.is_paused()
    assert await client.sleep_level() == (0 if rest == "sleep" else None)
    await asyncio.sleep(0.1)
    assert not running.done()
    await (client.resume() if rest == "pause" else client.wake_up())
    assert (await running)["r"][1] == FinishReason.LENGTH
    os.kill(client.pid, signal.SIGKILL)
    while client.num_restarts == 1:
        await asyncio.sleep(0.01)
    assert not await client.is_paused()
    await client.shutdown()


async def test_counters_go_on_after_a_restart_and_gauges_do_not() -> None:
    seen: list[SchedulerStats] = []

    class Listener(NullListener):
        def on_step(self, num_tokens: int, stats: SchedulerStats | None) -> None:
            if stats is not None:
                seen.append(stats)

    factory_config = {"step_time_s": 0.003, "num_draft_tokens": 2}
    settings = EngineConfig(forward_output=False, max_restarts=1)
    client = ProcessClient(FACTORY, factory_config, settings, Listener())
    await client.ready()
    assert client.pid is not None
    await collect(client.open([make_message("before", [1, 2, 3], 50)]))
    before = await client.stats()
    assert (before.num_prompt_tokens_total, before.num_generation_tokens_total) == (3, 50)
    running = asyncio.create_task(collect(client.open([make_message("through", [4, 5], 200)])))
    while seen[-1].num_prompt_tokens_total < 5:  # the client is told of both
        await asyncio.sleep(0.002)
    os.kill(client.pid, signal.SIGKILL)
    await running
    after = await client.stats()
    assert client.num_restarts == 1
    assert after.num_prompt_tokens_total == 5
    # What was made after the last statistics of the process that died is in no count.
    assert 50 < after.num_generation_tokens_total <= 250
    for earlier, later in itertools.pairwise([*seen, after]):
        for name in ("num_prompt_tokens_total", "num_generation_tokens_total", "num_draft_tokens_total"):
            assert getattr(earlier, name) <= getattr(later, name)
        for one, other in zip(
            earlier.num_accepted_tokens_per_pos_total, later.num_accepted_tokens_per_pos_total, strict=True
        ):
            assert one <= other
    assert any(stats.num_running == 0 and stats.num_waiting == 1 for stats in seen), "the request waits for the engine"
    await client.shutdown()
    assert seen[-1].num_running == seen[-1].num_waiting == 0
    assert seen[-1].num_generation_tokens_total == after.num_generation_tokens_total


async def test_a_request_that_kills_the_process_again_and_again_is_found_among_others() -> None:
    client = await start({"step_time_s": 0.002}, max_restarts=3)
    fine = [client.open([make_message(f"r{i}", [i], 300, seed=i)]) for i in range(5)]
    for stream in fine:
        async for output in stream:
            assert output.finish_reason is None
            break
    killer = await collect(client.open([make_message("exit", [4], 100)]))
    assert killer["exit"] == ([], FinishReason.ERROR)
    for i, stream in enumerate(fine):
        tokens, reason = (await collect(stream))[f"r{i}"]
        assert reason == FinishReason.LENGTH
        assert tokens == expected_output([i], 300, request_seed=i)[-len(tokens) :]
    later = await collect(client.open([make_message("later", [5], 100, seed=5)]))
    assert later["later"][0] == expected_output([5], 100, request_seed=5)
    assert client.num_restarts == 3
    await client.shutdown()


async def test_a_request_that_kills_the_process_alone_is_given_up_at_its_second_death() -> None:
    client = await start(max_restarts=3)
    assert (await collect(client.open([make_message("exit", [4], 100)])))["exit"] == ([], FinishReason.ERROR)
    assert client.num_restarts == 2
    await client.shutdown()


async def test_a_restart_that_fails_says_the_childs_own_cause(tmp_path: Path) -> None:
    (tmp_path / "works_once.py").write_text(
        "import os, pathlib\n"
        "from quire_testkit.fake_engine import fake_engine_factory\n"
        "def make(config, report):\n"
        "    marker = pathlib.Path(__file__).with_name('marker')\n"
        "    if marker.exists():\n"
        "        raise RuntimeError('the device does not come back')\n"
        "    marker.touch()\n"
        "    return fake_engine_factory(config, report)\n"
    )
    settings = EngineConfig(forward_output=False, max_restarts=2)
    client = ProcessClient("works_once:make", {"step_time_s": 0.005}, settings, sys_path=[str(tmp_path)])
    await client.ready()
    stream = client.open([make_message("r", [1], 900)])
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="the device does not come back"):
        await collect(stream)
    assert client.num_restarts == 2
    await client.shutdown()


async def test_restarts_are_bounded() -> None:
    client = await start(max_restarts=1)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while client.num_restarts == 0:
            await asyncio.sleep(0.01)
        await collect(client.open([make_message("a", [1], 2)]))
        os.kill(client.pid, signal.SIGKILL)
        while not client.is_dead:
            await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.check_health()
    await client.shutdown()


async def test_a_hanging_step_ends_the_engine() -> None:
    client = await start(step_timeout_s=0.5)
    with pytest.raises(EngineDeadError, match=r"step_timeout_s=0\.5"):
        await collect(client.open([make_message("hang", [1], 2)]))
    await client.shutdown()


async def test_a_device_that_fails_everything_ends_the_engine() -> None:
    client = await start(max_failed_steps=4)
    streams = [client.open([make_message(f"raise{i}", [i], 5)]) for i in range(8)]
    results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    dead = [result for result in results if isinstance(result, EngineDeadError)]
    assert dead
    assert "broke the step" in str(dead[0])
    await client.shutdown()


async def test_the_child_ignores_interrupts() -> None:
    client = await start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    assert (await collect(client.open([make_message("r", [1], 3)])))["r"][1] == FinishReason.LENGTH
    await client.shutdown()


async def test_what_cannot_be_sent_is_refused() -> None:
    client = await start()
    with pytest.raises(RequestError, match="cannot be sent"):
        client.open([make_message("odd", [1], 3, extra_args={"x": object()})])
    assert client.num_requests() == 0
    assert (await collect(client.open([make_message("odd", [1], 3)])))["odd"][1] == FinishReason.LENGTH
    with pytest.raises(RequestError, match="no utility 'explode'"):
        await client._call("explode")
    await client.shutdown()


async def test_requests_during_a_drain_are_refused() -> None:
    client = await start({"step_time_s": 0.01})
    first = asyncio.create_task(collect(client.open([make_message("first", [1], 60)])))
    await asyncio.sleep(0)  # it is opened
    stopping = asyncio.create_task(client.shutdown(60.0))
    await asyncio.sleep(0)  # the engine is told
    with pytest.raises(OverloadedError, match="shutting down"):
        await collect(client.open([make_message("second", [1], 2)]))
    await stopping
    assert (await first)["first"][1] == FinishReason.LENGTH


PARENT = """
    import asyncio, sys
    from quire_engine import ProcessClient
    from quire_testkit.fake_engine import FACTORY

    async def main():
        client = ProcessClient(FACTORY, {"step_time_s": 0.01})
        await client.ready()
        print(client.pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


async def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT)], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
        assert await wait_for_end(pid)


def test_long_temporary_folders_are_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    async def run() -> None:
        client = await start()
        assert (await collect(client.open([make_message("r", [1], 3)])))["r"][1] == FinishReason.LENGTH
        await client.shutdown()

    asyncio.run(run())
    assert not list(long.iterdir())


def test_sys_path_of_the_child(tmp_path: Path) -> None:
    (tmp_path / "my_factory.py").write_text(
        "from quire_testkit.fake_engine import fake_engine_factory as make\nprint('hello from my factory')\n"
    )

    async def run() -> None:
        client = ProcessClient("my_factory:make", {"num_blocks": 7}, EngineConfig(), sys_path=[str(tmp_path)])
        assert (await client.ready()).num_blocks == 7
        await client.shutdown()

    asyncio.run(run())


def test_failures_and_exits_are_explained() -> None:
    assert "Install the missing package" in describe_failure(ImportError("no module x"))[1]
    assert "smaller KV cache" in describe_failure(MemoryError())[1]
    assert describe_failure(ConfigError("max_num_seqs must be ..."))[1] == ""
    assert "path" in describe_failure(FileNotFoundError("x"))[1]
    assert "SIGSEGV" in explain_exit(-signal.SIGSEGV, "")
    assert "printed nothing" in explain_exit(2, "")
    assert "signal 99" in explain_exit(-99, "lines")


def test_a_factorys_own_missing_import_is_not_taken_for_a_missing_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import quire_no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="quire_no_such_module"):
        load_factory("needs_more:make")
