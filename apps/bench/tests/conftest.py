"""A tiny checkpoint, the commands as `quire` runs them, and a served engine without weights in other processes."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_bench.cli import register_bench, register_make_model
from quire_testkit.checkpoints import make_checkpoint

LAUNCH = """
import sys
from quire import QuireConfig
from quire_server.config import ServerConfig
from quire_server.serve import serve
from quire_testkit.fake_engine import FACTORY
engine = dict(vocab_size=1024, num_token_ids=1000, max_model_len=512, num_blocks=512, step_time_s=0.002)
server = ServerConfig(port=int(sys.argv[2]), banner=False, served_model_name=("tiny",))
sys.exit(serve(QuireConfig.of(model=sys.argv[1]), server, factory=(FACTORY, engine)))
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", like="qwen3", dtype="float32")


@pytest.fixture(scope="session")
def free_port() -> int:
    """Nothing answers there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def fake_server(tiny_model: Path) -> Iterator[str]:
    """Address of a real server over a fake engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([sys.executable, "-c", LAUNCH, str(tiny_model), str(port)]) as server:
        try:
            deadline = time.monotonic() + 120
            while not _answers(f"{url}/health"):
                assert server.poll() is None, "the server ended while starting"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
            yield url
        finally:
            server.terminate()
            assert server.wait(60) == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def quire() -> Callable[..., int]:
    """Run a command line in this process; the exit status."""

    def run(*arguments: object) -> int:
        parser = argparse.ArgumentParser("quire")
        commands = parser.add_subparsers(dest="command", required=True)
        register_bench(commands)
        register_make_model(commands)
        args = parser.parse_args([str(argument) for argument in arguments])
        return int(args.run(args))

    return run
