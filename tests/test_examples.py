"""Every file of examples/ runs as it stands, with the embedded demo model, and says what it should.

Sums must be right: the model adds and subtracts numbers below 100 without fail on questions it was never shown, so that
a wrong one is the engine's fault.
"""

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


SUM = r"ones 7 \+ 5 = 12, tens 2 \+ 3 \+ 1 = 6, so 27 \+ 35 = 62\."


def test_assemble_your_own(tmp_path: Path) -> None:
    assert re.fullmatch(SUM + "\n", run_example("assemble_your_own.py", folder=tmp_path))
    assert len((EXAMPLES / "assemble_your_own.py").read_text().splitlines()) < 80


def test_offline_batch(tmp_path: Path) -> None:
    lines = run_example("offline_batch.py", folder=tmp_path).splitlines()
    assert len(lines) == 11
    assert re.fullmatch(rf"'What is 27 \+ 35\?' -> '{SUM}' \(stop\)", lines[0])
    assert re.fullmatch(r"'What is 90 - 14\?' -> '.*, so 90 - 14 = 76\.' \(stop\)", lines[3])
    assert all(re.fullmatch(r"'What is 8 \+ 5\?' -> '.*, so 8 \+ 5 = 13\.' \(stop\)", line) for line in lines[5:10])
    hits, asked = map(int, re.findall(r"\d+", lines[-1]))
    assert 0 < hits < asked


def test_custom_logits_processor(tmp_path: Path) -> None:
    plain, begun = run_example("custom_logits_processor.py", "Tokens are", folder=tmp_path).splitlines()[:2]
    assert begun.startswith("with a beginning: Tokens are")
    assert len(begun) > len("with a beginning: Tokens are") + 5, "the model goes on by itself"
    assert len(plain) > 30
    assert "Tokens are" not in plain


def test_openai_client(tmp_path: Path, server: str) -> None:
    lines = run_example("openai_client.py", server, folder=tmp_path).splitlines()
    assert re.fullmatch(rf"[\w-]+: {SUM} \(stop, \d+ tokens\)", lines[0])
    assert re.fullmatch(rf"streamed: {SUM} \(\d+ tokens in all\)", lines[2])
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
