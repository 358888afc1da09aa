"""Decode steps on a GPU that is not here, by counting: no change makes them slower, or larger than planned, unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).parents[1] / "benchmarks/gpu_estimate.py"
ALLOWED = 1.03
WANTED = {
    "8b on h100, 1 requests at 1024": (5.87, 204),
    "8b on h100, 16 requests at 1024": (7.09, 300),
    "8b on h100, 64 requests at 1024": (9.91, 299),
    "0.6b on h100, 1 requests at 1024": (1.05, 180),
    "0.6b on h100, 16 requests at 1024": (2.10, 264),
    "0.6b on h100, 64 requests at 1024": (4.50, 263),
    "8b on h200, 1 requests at 1024": (4.36, 204),
    "8b on h200, 64 requests at 1024": (7.33, 299),
    "0.6b on h200, 1 requests at 1024": (0.92, 180),
    "8b on h200, 1 requests at 1024, int4 weights": (2.71, 396),
    "8b on h200, 64 requests at 1024, int8 cache": (6.18, 299),
    "0.6b on h200, 64 requests at 1024, drawn": (3.50, 268),
    "8b on h200, 64 requests at 1024, int4 weights": (6.23, 299),
    "8b on h200, 1 requests at 1024, fp8 weights": (3.91, 364),
    "8b on h200, 64 requests at 1024, mxfp8 weights": (8.55, 299),
    "8b on h200, 1 requests at 1024, w8a8 weights": (3.02, 397),
    "8b on h200, 64 requests at 1024, ptpc_fp8 weights": (5.95, 396),
}
"""Step -> its milliseconds and launches. Those of 16 and 64 requests on an H100 were measured on one (docs/gpu.md)."""


def lines(*arguments: str) -> list[str]:
    """What the command prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_steps_take_what_they_took() -> None:
    """All rows of the table."""
    found = {}
    for line in lines("--table"):
        words = line.split()
        if "launches," in words:
            took_ms, launches = (float(words[words.index(unit) - 1]) for unit in ("ms,", "launches,"))
            found[line.partition(":")[0]] = took_ms, launches
    assert set(found) == set(WANTED)
    for row, (wanted_ms, num_launches) in WANTED.items():
        took_ms, launches = found[row]
        assert wanted_ms / ALLOWED <= took_ms <= wanted_ms * ALLOWED, row
        assert launches <= num_launches, row


def test_graphs_take_no_more_memory_than_is_planned() -> None:
    """With few rows, whose keys are divided among the most programs, beside a long prompt."""
    sizes = dict(line.split(": ") for line in lines("8b", "--device", "h100", "--batch", "2", "--graph-memory"))
    decodes, mixed, planned = (float(sizes[name].split()[0]) for name in ("decodes", "mixed", "planned"))
    assert 0 < decodes < mixed <= planned < 2 * mixed
