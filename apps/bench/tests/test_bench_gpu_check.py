"""What is asked of a GPU that is there for a short time runs with little more than torch, Triton and Transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire_kernels_cuda.tuned import read_table

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


def run(tmp_path: Path, *parts: str, interpret: str, only: str = "") -> list[dict[str, Any]]:
    out = tmp_path / "results.json"
    command = [sys.executable, "-c", ABSENT, COMMAND, *parts, "--device", "cpu", "--out", out]
    command += ["--tables", tmp_path / "tables", *(["--only", only] if only else [])]
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: list[dict[str, Any]] = json.loads(out.read_text())
    measured = [figure for figure in figures if "of_limit" in figure]
    assert measured
    assert all(figure["of_limit"] > 0 and figure["median_ms"] > 0 for figure in measured)
    assert [figure["part"] for figure in figures if figure["what"] == "took"] == list(parts)
    return figures


def test_kernels_and_steps_are_measured_with_the_tensor_side_alone(tmp_path: Path) -> None:
    whats = [figure["what"] for figure in run(tmp_path, "kernels", "engine", interpret="0")]
    assert "decode tiny batch 2 context 32" in whats
    assert "prefill tiny 64" in whats
    assert any(what.startswith("rms_norm") for what in whats)


def test_steps_of_every_kind_are_measured_and_draws_compared(tmp_path: Path) -> None:
    only = "greedy,a penalty,a grammar,an adapter,drafts,cache in int8,weights in int4,mixed"
    figures = run(tmp_path, "steps", "draws", interpret="0", only=only)
    whats = [figure["what"] for figure in figures if "of_limit" in figure]
    assert len(whats) == 8
    for kind in only.split(","):
        assert sum(kind in what for what in whats) == 1, kind
    draws = [figure for figure in figures if figure["part"] == "draws" and "right" in figure]
    assert len(draws) >= 10
    assert all(figure["right"] and figure["median_us"] > 0 for figure in draws)


def test_gate_and_up_in_one_kernel_and_joined_products_are_held_against_what_they_replace(tmp_path: Path) -> None:
    """Where kernels are interpreted, to try the command; the table that one part leaves is the other's."""
    figures = run(tmp_path, "gated", "joined", interpret="1")
    whats = [figure["what"] for figure in figures]
    ways = {what.partition(": ")[2] for what in whats if what.startswith("tiny batch 2: ")}
    assert ways == {"torch's product and the gate", "our product and the gate", "one kernel", "chosen"}
    decode = "decode tiny batch 2 context 32"
    assert {f"{decode}, apart", f"{decode}, joined", f"{decode}, joined, tuned"} <= set(whats)
    kernels = {entry.problem.kernel for entry in read_table(tmp_path / "tables/cpu.json")}
    chosen = next(figure["chosen"] for figure in figures if "chosen" in figure)
    assert ("gated_matmul" in kernels) == (chosen == "one kernel")
