"""The package as a whole: its README's examples, what importing it loads, its names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import quire_distributed

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


def test_importing_the_package_loads_no_torch() -> None:
    loaded = python("import quire_distributed, sys; quire_distributed.Mesh(tp=2); print(*sys.modules)").split()
    assert not {"torch", "numpy"} & set(loaded)


def test_all_names_exist() -> None:
    for name in quire_distributed.__all__:
        assert getattr(quire_distributed, name) is not None
