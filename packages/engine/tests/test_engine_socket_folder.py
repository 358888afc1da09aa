"""Folders of sockets go with their process, or with the next one's start where it was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire_engine.socket_folder import SocketFolder

OWNER = (
    "from quire_engine.socket_folder import SocketFolder; print(SocketFolder(longest_name=3).path, flush=True); input()"
)


def test_the_next_start_removes_what_a_killed_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            left = Path(owner.stdout.readline().strip())
            assert left.parent == tmp_path
            own = SocketFolder(longest_name=3)
            assert left.is_dir(), "its process lives"
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
    assert left.is_dir(), "nobody could remove it"
    other = SocketFolder(longest_name=3)
    assert not left.exists()
    assert Path(own.path).is_dir()
    for folder in (own, other):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_long_paths_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = SocketFolder(longest_name=3)
    try:
        assert Path(folder.path).parent == Path("/tmp")
        assert list(deep.iterdir()) == []
    finally:
        folder.close()
