"""The engine package stays light: no torch, nothing of either side."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_engine_loads_nothing_heavy() -> None:
    loaded = run(
        "import sys, pkgutil, importlib, quire_engine\n"
        "for module in pkgutil.iter_modules(quire_engine.__path__):\n"
        "    importlib.import_module('quire_engine.' + module.name)\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    ).split()
    ours = {name for name in loaded if name.startswith("quire") and not name.startswith("quire_engine")}
    # An editable installation leaves finder modules behind; they are not packages of ours.
    assert {name for name in ours if not name.startswith("__")} == {"quire_interfaces"}
    for heavy in ("torch", "numpy", "transformers", "tokenizers", "pydantic", "fastapi"):
        assert heavy not in loaded


def test_a_client_of_a_running_engine_loads_nothing_heavy() -> None:
    run(
        "import asyncio, sys\n"
        "from quire_engine import AsyncEngine, ProcessClient\n"
        "from quire_interfaces import SamplingParams\n"
        "async def main():\n"
        "    client = ProcessClient('quire_testkit.fake_engine:fake_engine_factory', {})\n"
        "    await client.ready()\n"
        "    async for output in AsyncEngine(client).generate([1], SamplingParams(max_tokens=3)):\n"
        "        pass\n"
        "    await client.shutdown()\n"
        "    for heavy in ('torch', 'quire_scheduler', 'quire_kv_cache', 'quire_testkit'):\n"
        "        assert heavy not in sys.modules, heavy\n"
        "asyncio.run(main())"
    )


def test_everything_exported_exists() -> None:
    import quire_engine

    assert [name for name in quire_engine.__all__ if not hasattr(quire_engine, name)] == []
    assert sorted(quire_engine.__all__) == quire_engine.__all__


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_the_readme_example_runs(block: str) -> None:
    run(block)
