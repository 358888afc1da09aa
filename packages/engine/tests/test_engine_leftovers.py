"""However an engine process or its parent ends, nothing of theirs stays in the temporary folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_engine import EngineConfig, ProcessClient
from quire_interfaces import EngineDeadError, FinishReason
from quire_testkit.conformance.engine_client import collect, make_message
from quire_testkit.fake_engine import FACTORY

PARENT = """
    import asyncio, signal, sys, time
    from quire_engine import ProcessClient
    from quire_testkit.fake_engine import FACTORY

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    client = ProcessClient(FACTORY, {"fault": "hang"} if sys.argv[1] == "loading" else {})
    client.start()

    async def main():
        await client.ready()

    if sys.argv[1] == "loading":
        time.sleep(1.0)  # the child has read its orders by then
    else:
        asyncio.run(main())
    print(client.pid, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(60)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of this test's processes. Not tmp_path, which may be too long for a socket."""
    path = Path(tempfile.mkdtemp(prefix="quire-test-"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", str(path))
    yield path
    shutil.rmtree(path)


def wait_until_empty(folder: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while left := list(folder.iterdir()):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def start_parent(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A process with an engine, and the engine's process id."""
    command = [sys.executable, "-c", textwrap.dedent(PARENT), *arguments]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stage", ["loading", "ready"])
def test_a_parent_that_is_ended_by_a_signal(folder: Path, stage: str, number: signal.Signals) -> None:
    parent, _ = start_parent(stage, "wait")
    with parent:
        assert bool(list(folder.iterdir())) == (stage == "loading"), "the sockets have names only while they connect"
        parent.send_signal(number)
    wait_until_empty(folder)


@pytest.mark.parametrize("stage", ["loading", "ready"])
def test_a_parent_that_forgets_to_shut_down(folder: Path, stage: str) -> None:
    parent, _ = start_parent(stage, "leave")
    with parent:
        assert parent.wait(30) == 0
    wait_until_empty(folder)


def test_parent_and_engine_killed_at_once(folder: Path) -> None:
    parent, pid = start_parent("ready", "wait")
    with parent:
        os.kill(pid, signal.SIGKILL)
        parent.kill()
    wait_until_empty(folder)


async def test_an_engine_that_is_killed_while_it_loads(folder: Path) -> None:
    client = ProcessClient(FACTORY, {"fault": "hang"}, EngineConfig(forward_output=False))
    client.start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await client.ready()
    wait_until_empty(folder)  # before any shutdown, which a program in trouble may never come to
    await client.shutdown()


async def test_an_engine_that_is_started_again(folder: Path) -> None:
    client = ProcessClient(FACTORY, {}, EngineConfig(forward_output=False, max_restarts=1))
    await client.ready()
    wait_until_empty(folder)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while client.num_restarts == 0:
            await asyncio.sleep(0.01)
        # It is spoken to in both directions long after the names are gone.
        for name in ("a", "b"):
            assert (await collect(client.open([make_message(name, [1], 5)])))[name][1] == FinishReason.LENGTH
    wait_until_empty(folder)
    await client.shutdown()
    wait_until_empty(folder)
