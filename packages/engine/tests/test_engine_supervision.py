"""What is logged and counted when an engine process dies, hangs, stalls or cannot be started; what it logs itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from quire_engine import EngineConfig, InprocClient, NullListener, ProcessClient
from quire_engine import process_client as process_client_module
from quire_engine.log_relay import MARK, LogReceiver
from quire_interfaces import EngineDeadError, FinishReason
from quire_testkit.conformance.engine_client import collect, make_message
from quire_testkit.fake_engine import FACTORY, fake_engine_factory

BLOCKING_ONCE = """
import pathlib, time
from quire_testkit.fake_engine import fake_engine_factory

class Blocking:
    def __init__(self, inner, marker):
        self.inner, self.marker = inner, marker
    def execute(self, output):
        if not self.marker.exists():
            self.marker.touch()
            time.sleep(60)  # a synchronous step: the engine's own loop is inside of it
        return self.inner.execute(output)
    def close(self):
        self.inner.close()

def make(config, report):
    parts = fake_engine_factory(config, report)
    parts.executor = Blocking(parts.executor, pathlib.Path(__file__).with_name("marker"))
    return parts
"""

TALKING = """
import logging, sys, warnings
from quire_testkit.fake_engine import fake_engine_factory

def make(config, report):
    print("printed by a native library")
    logging.getLogger("quire_talking").info("loading %s", "something")
    logging.getLogger("quire_talking").debug("not asked for")
    warnings.warn("a library's warning")
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("quire_talking").exception("it failed")
    return fake_engine_factory(config, report)
"""


class Listener(NullListener):
    """Remembers."""

    def __init__(self) -> None:
        self.restarts: list[str] = []
        self.num_stalls = 0

    def on_restart(self, reason: str) -> None:
        self.restarts.append(reason)

    def on_stall(self) -> None:
        self.num_stalls += 1


def messages_of(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


async def test_a_death_and_a_restart_are_logged_with_their_cause(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    client = ProcessClient(FACTORY, {}, EngineConfig(max_restarts=1), listener)
    await client.ready()
    assert not client.is_loading
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while client.num_restarts == 0:
            await asyncio.sleep(0.01)
        assert client.is_loading, "requests wait until it is there again"
        assert (await collect(client.open([make_message("a", [1], 2)])))["a"][1] == FinishReason.LENGTH
        assert not client.is_loading
        assert listener.restarts == ["SIGKILL"]
        (told,) = messages_of(caplog)
        assert told.startswith("the engine is started again (1 of max_restarts=1 within an hour, 0 requests in flight)")
        assert "SIGKILL" in told
        caplog.clear()
        os.kill(client.pid, signal.SIGSEGV)
        while not client.is_dead:
            await asyncio.sleep(0.01)
    assert listener.restarts == ["SIGKILL"]
    (told,) = messages_of(caplog)
    assert told.startswith("the engine is gone for good")
    assert "SIGSEGV" in told
    await client.shutdown()


async def test_an_orderly_end_and_a_failed_start_log_no_death(caplog: pytest.LogCaptureFixture) -> None:
    client = ProcessClient(FACTORY, {}, EngineConfig())
    await client.ready()
    await client.shutdown()
    client = ProcessClient(FACTORY, {"fault": "no such device"}, EngineConfig())
    with pytest.raises(EngineDeadError, match="no such device") as caught:
        await client.ready()
    assert messages_of(caplog) == []
    assert "Traceback" not in str(caught.value)
    await client.shutdown()


def make_inproc(config: EngineConfig, listener: Listener, **engine: Any) -> InprocClient:
    return InprocClient(fake_engine_factory(engine, lambda stage, fraction: None), config, listener)


def make_process(config: EngineConfig, listener: Listener, **engine: Any) -> ProcessClient:
    return ProcessClient(FACTORY, engine, config, listener)


@pytest.mark.parametrize("make", [make_inproc, make_process])
async def test_steps_that_take_too_long_are_told_as_a_stall(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    client = make(EngineConfig(stall_timeout_s=0.5, max_restarts=0), listener, step_time_s=1.5)
    await client.ready()
    assert client.stalled_s == 0.0
    await asyncio.sleep(0.7)
    assert not client.is_stalled, "it has nothing to do"
    outputs = client.open([make_message("r", [1], 1)])
    assert not client.is_stalled
    async with asyncio.timeout(20):
        while not client.is_stalled:
            await asyncio.sleep(0.01)
        assert client.stalled_s >= 0.5
        await collect(outputs)
        assert not client.is_stalled
        while len(messages_of(caplog)) < 2:
            await asyncio.sleep(0.01)
    assert listener.num_stalls == 1
    stalled, recovered = messages_of(caplog)
    assert "the engine is stalled: it has taken no step" in stalled
    assert "1 requests" in stalled
    assert recovered == "the engine is not stalled any more"
    await client.shutdown()


async def test_many_steps_are_no_stall_however_long_they_take_together() -> None:
    listener = Listener()
    client = make_process(EngineConfig(stall_timeout_s=2.0), listener, step_time_s=0.2)
    await client.ready()
    begin = time.monotonic()
    async for _ in client.open([make_message("r", [1], 15)]):
        assert not client.is_stalled
    assert time.monotonic() - begin > 2.5
    assert listener.num_stalls == 0
    await client.shutdown()


async def test_requests_that_are_held_are_no_stall() -> None:
    listener = Listener()
    client = make_process(EngineConfig(stall_timeout_s=0.3), listener)
    await client.ready()
    await client.pause()
    outputs = client.open([make_message("r", [1], 2)])
    await asyncio.sleep(0.6)
    assert (client.is_resting, client.stalled_s, listener.num_stalls) == (True, 0.0, 0)
    await client.resume()
    assert not client.is_stalled, "it was held until now"
    assert (await collect(outputs))["r"][1] == FinishReason.LENGTH
    assert not client.is_resting
    await client.shutdown()


async def test_a_synchronous_step_that_hangs_ends_the_process_and_the_request_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_client_module, "HANG_GRACE_S", 0.2)
    (tmp_path / "blocks_once.py").write_text(BLOCKING_ONCE)
    listener = Listener()
    config = EngineConfig(step_timeout_s=0.5, max_restarts=1)
    client = ProcessClient("blocks_once:make", {}, config, listener, sys_path=[str(tmp_path)])
    await client.ready()
    async with asyncio.timeout(20):
        assert (await collect(client.open([make_message("r", [1], 3)])))["r"][1] == FinishReason.LENGTH
    assert listener.restarts == ["failure"]
    (told,) = messages_of(caplog)
    assert "a step took longer than step_timeout_s=0.5" in told
    await client.shutdown()


async def test_an_engine_that_answers_is_not_ended_however_long_its_requests_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_client_module, "HANG_GRACE_S", 0.2)
    client = ProcessClient(FACTORY, {}, EngineConfig(step_timeout_s=0.3, max_restarts=0))
    await client.ready()
    await client.pause()
    outputs = client.open([make_message("r", [1], 2)])
    client._rest = None  # as if the engine held them by itself, as while a grammar is compiled
    await asyncio.sleep(1.5)
    await client.resume()
    assert (await collect(outputs))["r"][1] == FinishReason.LENGTH
    await client.shutdown()


async def test_without_file_descriptors_the_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    client = ProcessClient(FACTORY, {}, EngineConfig(max_restarts=5))
    await client.ready()
    assert client.pid is not None
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, former[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while len(messages_of(caplog)) < 2:
                await asyncio.sleep(0.01)
            assert client.is_loading
            stream = client.open([make_message("meanwhile", [1], 2)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)
        for fd in held:
            os.close(fd)
    assert "the engine process cannot be started: Too many open files" in messages_of(caplog)[1]
    async with asyncio.timeout(20):
        assert (await collect(stream))["meanwhile"][1] == FinishReason.LENGTH
    await client.shutdown()


async def test_what_the_process_logs_and_prints_is_logged_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "talks.py").write_text(TALKING)
    before_s = time.time()
    client = ProcessClient("talks:make", {}, EngineConfig(), sys_path=[str(tmp_path)])
    await client.ready()
    pid = client.pid
    await client.shutdown()
    told = {record.getMessage().strip(): record for record in caplog.records}
    own = told["loading something"]
    assert (own.name, own.levelno, own.processName, own.process) == ("quire_talking", logging.INFO, "engine", pid)
    assert before_s - 1 <= own.created <= time.time() + 1
    assert told["printed by a native library"].name == "quire_engine.output"
    assert told["it failed"].levelno == logging.ERROR
    assert "ValueError: inner" in str(told["it failed"].exc_text)
    (warning,) = [record for record in caplog.records if record.name == "py.warnings"]
    assert "a library's warning" in warning.getMessage()
    assert "not asked for" not in told


async def test_output_that_is_not_wanted_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "talks.py").write_text(TALKING)
    client = ProcessClient("talks:make", {}, EngineConfig(forward_output=False), sys_path=[str(tmp_path)])
    await client.ready()
    await client.shutdown()
    assert caplog.records == []


def marked(**fields: Any) -> str:
    return MARK + json.dumps({"name": "quire_x", "level": logging.INFO, "message": "hi", "time": 1.5, **fields})


def test_lines_in_pieces_and_lines_in_one_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    receiver = LogReceiver(7, is_repeated=True)
    assert receiver.take(marked()[:10]) == ""
    assert receiver.take(marked()[10:] + "\nhalf") == "INFO quire_x: hi\n"
    assert receiver.take(marked(message="two") + "\n" + MARK + "{}\n  \n") == f"INFO quire_x: two\n{MARK}{{}}\n  \n"
    assert receiver.take("10 %\r20 %\r100 %\r\nno end") == "100 %\n"
    assert receiver.finish() == "no end"
    assert receiver.finish() == ""
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("quire_x", "hi"),
        ("quire_engine.output", "half"),
        ("quire_x", "two"),
        ("quire_engine.output", f"{MARK}{{}}"),
        ("quire_engine.output", "100 %"),
        ("quire_engine.output", "no end"),
    ]


def test_a_line_without_end_is_told_in_pieces() -> None:
    receiver = LogReceiver(7, is_repeated=False)
    assert len(receiver.take("x" * (3 << 20))) == (3 << 20) + 1
    assert receiver.finish() == ""
