"""What other processes print is in the log, line by line."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire_server.log_pipe import log_pipe
from quire_server.mcp_servers import read_mcp_servers


@pytest.fixture
def wait_for_pipes() -> Callable[[], None]:
    """Wait until what was piped since the test began is in the log."""
    before = threading.enumerate()  # other tests' servers may be running

    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "quire-log-pipe" and thread not in before:
                thread.join(20)

    return wait


def test_lines_of_another_process(caplog: pytest.LogCaptureFixture, wait_for_pipes: Callable[[], None]) -> None:
    caplog.set_level(logging.INFO)
    program = "import sys; sys.stderr.buffer.write(b'one\\n\\n  \\ntwo \\xff\\nno end')"
    with log_pipe(logging.getLogger("quire_x"), "mcp") as file:
        subprocess.run([sys.executable, "-c", program], stderr=file, check=True)
    wait_for_pipes()
    assert [record.getMessage() for record in caplog.records] == ["one", "two \ufffd", "no end"]
    assert {(record.name, record.levelname, record.processName) for record in caplog.records} == {
        ("quire_x", "INFO", "mcp")
    }


async def test_mcp_servers_log_here(
    caplog: pytest.LogCaptureFixture, capfd: Any, tmp_path: Any, wait_for_pipes: Callable[[], None]
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "servers.yaml"
    program = "import sys; print('no licence', file=sys.stderr)"
    path.write_text(f"mcpServers: {{x: {{command: {sys.executable}, args: [-c, {program!r}]}}}}")
    server = read_mcp_servers(str(path), 5.0)["x"]
    with pytest.raises(Exception, match="x"):
        await server.list_tools()
    await server.close()
    wait_for_pipes()
    assert any("no licence" in record.getMessage() for record in caplog.records)
    assert "no licence" not in capfd.readouterr().err
