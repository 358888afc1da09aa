"""The package as a whole: its README's example, its imports, that equal calls give equal plans."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

import quire_scheduler
from quire_testkit.conformance.scheduler import make_request

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_readme_example(capsys):
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
    assert "length" in capsys.readouterr().out


def test_import_is_light():
    code = "import sys, quire_scheduler; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "quire_scheduler" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "msgspec", "pydantic", "quire_kv_cache", "asyncio"})


def test_all_names_exist():
    for name in quire_scheduler.__all__:
        assert getattr(quire_scheduler, name).__doc__


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_calls_give_equal_plans(make_driver, depth):
    def plans():
        driver = make_driver(num_blocks=7, max_num_seqs=4, depth=depth, num_speculative_tokens=2, prefix_cache=True)
        driver.add(*[make_request(f"r{i}", range(i % 3, 9), max_tokens=9, seed=i) for i in range(6)])
        driver.run()
        return driver.steps

    assert plans() == plans()
