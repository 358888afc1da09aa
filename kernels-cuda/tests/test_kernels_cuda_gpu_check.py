"""What is asked of a GPU that is there for a short time runs with little more than torch, Triton and Transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).parents[1] / "benchmarks/gpu_check.py"
ABSENT = """
import runpy, sys

class Absent:
    names = set("fastapi pydantic msgspec zmq uvicorn starlette prometheus_client rich xxhash cbor2 "
                "llguidance openai".split())

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Absent())
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


def test_kernels_and_steps_are_measured_with_the_tensor_side_alone(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-c", ABSENT, COMMAND, "kernels", "engine", "--device", "cpu", "--out", out]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    whats = [figure["what"] for figure in figures]
    assert "decode tiny batch 2 context 32" in whats
    assert "prefill tiny 64" in whats
    assert any(what.startswith("rms_norm") for what in whats)
    measured = [figure for figure in figures if "of_limit" in figure]
    assert all(figure["of_limit"] > 0 and figure["median_ms"] > 0 for figure in measured)
