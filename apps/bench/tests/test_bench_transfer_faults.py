"""The script that hands requests on over bad links, with few faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).parents[1] / "benchmarks/transfer_faults.py"


def test_faults_cost_computing_only() -> None:
    command = [sys.executable, COMMAND, "--faults", "20", "--most-wait", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 faults: 0 wrong outputs, 0 waits over 600 s, 0.0% of blocks not given back" in done.stdout
