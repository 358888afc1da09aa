"""An engine in a process of its own: its replies, its failures, its end; and that it does nothing between runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire_bench import BenchRequest
from quire_bench.peer_process import PeerProcess, engine_settings
from quire_bench.peers import Engine
from quire_interfaces import QuireError

PROGRAM = Path(__file__).parent / "fake_peer_program.py"
SETTINGS = engine_settings(Path("nowhere"), dtype="float32", num_threads=1, max_model_len=64, max_num_seqs=4)
REQUESTS = [BenchRequest([11, 12, 13], 5), BenchRequest([14], 3)]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(timeout_s: float = 60.0, **asked: Any) -> PeerProcess:
        monkeypatch.setenv("FAKE_PEER", json.dumps(asked))
        return PeerProcess(Engine(name="fake", command=(sys.executable, str(PROGRAM))), SETTINGS, timeout_s=timeout_s)

    return make


def test_it_is_timed_where_it_runs_and_what_it_prints_does_no_harm(start: Any) -> None:
    with start(token_s=0.02) as peer:
        assert peer.version == "fake float32 4"
        assert 0.02 < peer.first_token_s < 30
        assert 0.16 <= peer.run(REQUESTS) < 5
        assert 0.16 <= peer.run(REQUESTS) < 5


def test_it_is_stopped_between_runs(start: Any) -> None:
    with start() as peer:
        process = psutil.Process(peer._process.pid)
        assert process.status() == psutil.STATUS_STOPPED
        peer.run(REQUESTS)
        assert process.status() == psutil.STATUS_STOPPED


def test_memory_of_its_children_counts(start: Any) -> None:
    with start(memory_bytes=50_000_000, child=True) as peer:
        peer.run(REQUESTS)
        end = time.monotonic() + 60
        while (peak := peer.peak_memory_bytes()) < 130_000_000:
            assert time.monotonic() < end, peak
            peer.run(REQUESTS)  # the child runs only while the peer does
        assert peak < 400_000_000


def test_nothing_of_it_stays(start: Any) -> None:
    with start(child=True) as peer:
        processes = [psutil.Process(peer._process.pid), *psutil.Process(peer._process.pid).children()]
        assert len(processes) == 2
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    peer.close()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"fails_at": "start"},
            r"fake: start failed: RuntimeError: asked to fail at the start(?s:.*)licence has expired",
        ),
        ({"hangs_at": "start"}, r"fake: start took longer than 1 s \(--timeout\)"),
    ],
)
def test_a_start_that_fails(start: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(QuireError, match=message):
        start(timeout_s=1.0 if "hangs_at" in asked else 60.0, **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"fails_at": 2}, "fake: a run of 2 requests failed: MemoryError: asked to fail"),
        ({"exits_at": 2}, "fake: a run of 2 requests failed: ended without a word"),
        ({"hangs_at": 2}, "fake: a run of 2 requests took longer than 2 s"),
        ({"short_by": 1}, "a request for 1 tokens ended with 0"),
    ],
)
def test_a_run_that_fails_ends_the_process(start: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(QuireError, match=message):  # noqa: PT012 - "short_by" fails in the first token
        peer = start(timeout_s=2.0 if "hangs_at" in asked else 60.0, **asked)
        try:
            peer.run(REQUESTS)
        finally:
            assert not psutil.pid_exists(peer._process.pid) or peer._process.returncode is not None


def test_an_interpreter_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKE_PEER", raising=False)
    engine = Engine(name="odd", command=(sys.executable, "-c", "print('hello')"))
    with pytest.raises(QuireError, match="odd: start failed: said something unreadable: b'hello'"):
        PeerProcess(engine, SETTINGS, timeout_s=30)


def test_an_engine_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(name="deaf", command=(sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(QuireError, match=r"deaf: did not read its input for 1 s \(--timeout\)"):
        PeerProcess(engine, {**SETTINGS, "much": "x" * 500_000}, timeout_s=1.0)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from quire_bench.peer_process import PeerProcess, engine_settings\n"
        "from quire_bench.peers import Engine\n"
        "settings = engine_settings(Path('x'), dtype='float32', num_threads=1, max_model_len=8, max_num_seqs=1)\n"
        f"peer = PeerProcess(Engine(name='fake', command=(sys.executable, {str(PROGRAM)!r})), settings, timeout_s=30)\n"
        "print(peer._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FAKE_PEER"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        parent.kill()
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
