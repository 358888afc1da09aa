"""`quire serve --headless`: a host without a server waits for the engine, and ends when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.headless import serve_headless


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give --nnodes, --node-rank above 0 and --master-addr"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "node_rank 0 has the server and cannot be headless"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 3}, "cannot be spread evenly over nnodes 2"),
    ],
)
def test_a_host_that_has_nothing_to_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_headless(QuireConfig.of(headless=True, **settings), ServerConfig())


def test_it_waits_for_the_engine_and_ends_on_sigterm() -> None:
    flags = ["--headless", "-tp", "2", "-n", "2", "-r", "1", "--master-port", "1"]
    node = subprocess.Popen(
        [sys.executable, "-m", "quire_server.cli", "serve", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        assert node.stderr is not None
        assert any("node 1 waits for an engine at 127.0.0.1:1" in line for line in node.stderr)
        node.send_signal(signal.SIGTERM)
        node.communicate(timeout=60)
        assert node.returncode == 0
    finally:
        node.kill()
        node.wait()
