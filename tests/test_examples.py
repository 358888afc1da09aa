"""Every file of examples/ runs as it stands, with the embedded demo model, and says what it should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(name: str, *arguments: str, folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a served demo model; the server says it on its banner."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--max-model-len", "512"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + 240
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) or not answers(found[0]):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, f"the server did not start: {log.read_text()}"
                time.sleep(0.2)
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_assemble_your_own(tmp_path: Path) -> None:
    assert "62" in run_example("assemble_your_own.py", folder=tmp_path)
    assert len((EXAMPLES / "assemble_your_own.py").read_text().splitlines()) < 80


def test_offline_batch(tmp_path: Path) -> None:
    lines = run_example("offline_batch.py", folder=tmp_path).splitlines()
    assert len(lines) == 11
    assert "62" in lines[0]
    assert "76" in lines[3]
    assert all("13" in line for line in lines[5:10])
    hits, asked = map(int, re.findall(r"\d+", lines[-1]))
    assert 0 < hits < asked


def test_custom_logits_processor(tmp_path: Path) -> None:
    plain, without = run_example("custom_logits_processor.py", "e", folder=tmp_path).splitlines()[:2]
    assert "e" in plain.split(":", 1)[1].lower()
    text = without.split(":", 1)[1].lower()
    assert len(text) > 10
    assert "e" not in text


def test_openai_client(tmp_path: Path, server: str) -> None:
    lines = run_example("openai_client.py", server, folder=tmp_path).splitlines()
    assert "62" in lines[0]
    assert "(stop, " in lines[0]
    assert re.fullmatch(r"streamed: .*62.* \(\d+ in all\)", lines[2])
    assert [line.split(":")[0] for line in lines[3:]] == ["completion 0", "completion 1"]


def test_openai_client_without_a_server(tmp_path: Path) -> None:
    environment = {**os.environ, "OPENAI_MAX_RETRIES": "0"}
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "openai_client.py"), "http://127.0.0.1:9"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert run.returncode == 1
    assert "Connection error" in run.stderr


def test_every_example_is_tested() -> None:
    tested = set(re.findall(r'run_example\("(\w+\.py)"', Path(__file__).read_text()))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")}
