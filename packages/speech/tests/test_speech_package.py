"""The package as a whole: its README's example, what importing it loads, its names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import quire_speech

README = Path(__file__).parents[1] / "README.md"


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        python(block)


def test_importing_it_loads_no_numpy() -> None:
    loaded = python("import quire_speech, sys; print(*sys.modules)").split()
    assert not {"torch", "numpy"} & set(loaded)


def test_all_names_exist() -> None:
    for name in quire_speech.__all__:
        assert getattr(quire_speech, name) is not None
