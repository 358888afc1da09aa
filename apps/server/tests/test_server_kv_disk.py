"""`--kv-disk-path` on the command line: a second server answers from what the first one computed, and says so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

LONG = " ".join(f"the quire gathers page {number}" for number in range(12))
BODY = {"prompt": LONG, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@contextmanager
def served(model: Path, disk: Path, log: Path) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "quire_server.cli", "serve", str(model), "--port", "0", "--num-threads", "1"]
    command += ["--max-model-len", "512", "--kv-disk-path", str(disk), "--kv-disk-size", "20M"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            end, found = time.monotonic() + 120, None
            while found is None:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
                found = re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())
            with httpx.Client(base_url=found[1], timeout=60) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()


def test_a_prefix_survives_a_restart_of_the_server(tiny_folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "tier"
    answers = []
    for name in ("first", "second"):
        log = tmp_path / name
        with served(tiny_folder, disk, log) as client:
            answers.append(client.post("/v1/completions", json=BODY).raise_for_status().json())
            metrics = client.get("/metrics").text
        assert str(disk) in log.read_text(), "the banner says where prefixes are kept"
        assert len(list(disk.rglob("*.kv"))) >= answers[0]["usage"]["prompt_tokens"] // 16, "written at the latest now"
        assert not list(disk.rglob("*.tmp"))
    first, second = answers
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == (second["usage"]["prompt_tokens"] - 1) // 16 * 16 > 0
    hits = re.search(r"^quire:external_prefix_cache_hits_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert hits
    assert float(hits[1]) == num_cached


def test_a_folder_that_cannot_be_used_is_said_before_anything_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "quire_server.cli", "serve", str(tiny_folder), "--port", "0"]
    command += ["--kv-disk-path", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2  # the engine says so
    assert "no files can be written" in done.stderr + done.stdout
