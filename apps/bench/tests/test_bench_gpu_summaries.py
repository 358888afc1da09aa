"""Tests on a GPU leave a line for each file that has ended, however the run ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILES = {
    "test_good.py": "import pytest\n\ndef test_one(): pass\n\ndef test_two(): pass\n\n"
    "@pytest.mark.skip\ndef test_left(): pass\n",
    "test_bad.py": "def test_bad():\n    assert 1 == 2, 'told'\n\ndef test_fine(): pass\n",
    "test_cut.py": "import os\n\ndef test_before(): pass\n\ndef test_kill():\n    os._exit(9)\n",
}


def run(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    out = folder / "summaries.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider"]
    command += ["-p", "file_summaries", f"--file-summaries={out}", *arguments]
    subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(BENCHMARKS)}, capture_output=True, timeout=120)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {line["file"]: line for line in lines}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_each_file_is_told(tmp_path: Path, workers: tuple[str, ...]) -> None:
    files = run(tmp_path, *workers, "test_good.py", "test_bad.py")
    good, bad = files["test_good"], files["test_bad"]
    assert (good["passed"], good["failed"], good["skipped"], good["not_run"]) == (2, 0, 1, 0)
    assert (bad["passed"], bad["failed"], bad["skipped"], bad["not_run"]) == (1, 1, 0, 0)
    assert "told" in "\n".join(bad["failures"][0])


def test_what_ended_before_a_run_was_cut_is_told(tmp_path: Path) -> None:
    files = run(tmp_path, "test_good.py", "test_cut.py")
    assert files["test_good"]["passed"] == 2
    assert "test_cut" not in files


def test_a_run_that_is_stopped_tells_how_much_is_left(tmp_path: Path) -> None:
    files = run(tmp_path, "-x", "test_bad.py", "test_good.py")
    assert (files["test_bad"]["failed"], files["test_bad"]["not_run"]) == (1, 1)
    assert "test_good" not in files
