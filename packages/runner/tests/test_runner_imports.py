"""A planning process must not pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import quire_runner


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import quire_runner", "from quire_runner import RunnerConfig, activation_bytes, row_bytes"],
)
def test_no_torch(statement: str) -> None:
    modules = loaded_by(statement)
    assert "quire_runner" in modules
    assert not modules & {"torch", "numpy", "msgspec", "pydantic"}


def test_the_runner_itself_loads_no_policy_and_no_wire() -> None:
    modules = loaded_by("from quire_runner import ModelRunner, ThreadedExecutor")
    assert "torch" in modules
    assert not modules & {"quire_scheduler", "quire_kv_cache", "quire_testkit", "msgspec", "pydantic", "transformers"}


def test_every_public_name_is_there() -> None:
    assert set(quire_runner.__all__) <= set(dir(quire_runner))
    for name in quire_runner.__all__:
        assert getattr(quire_runner, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        quire_runner.missing  # noqa: B018
