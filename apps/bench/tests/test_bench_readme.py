"""The README's python blocks run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_example_runs(block: str) -> None:
    run = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "32 output tokens" in run.stdout
