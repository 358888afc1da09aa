"""Decode steps on a GPU that is not here, by counting their launches and bytes: no change makes them slower unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[1] / "benchmarks/gpu_estimate.py"
ALLOWED = 1.03


@pytest.mark.parametrize(
    ("shape", "device", "batch", "wanted_ms", "num_launches"),
    [("8b", "h100", 64, 9.91, 299), ("0.6b", "h100", 1, 1.29, 291), ("8b", "h200", 1, 4.63, 331)],
)
def test_steps_take_what_they_took(shape: str, device: str, batch: int, wanted_ms: float, num_launches: int) -> None:
    """An H100's are what was measured on one (docs/gpu.md)."""
    arguments = [shape, "--device", device, "--batch", str(batch), "--context", "1024"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    took_ms, launches = (float(words[words.index(unit) - 1]) for unit in ("ms,", "launches,"))
    assert wanted_ms / ALLOWED <= took_ms <= wanted_ms * ALLOWED
    assert launches <= num_launches
