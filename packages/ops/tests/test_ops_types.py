"""The type checker holds kernels and callers to an op: what mypy says about right and wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"
BEGINNING = """
from quire_ops.op import Op, implements, op
from quire_ops.table import BackendSet, OpRequest, OpTable

backend_for = BackendSet("mine")

@op
def scaled(x: float, factor: float, *, wide: bool = False) -> float:
    return x * factor
"""
RIGHT = {
    "a kernel": "@backend_for(scaled)\ndef a(x: float, factor: float, *, wide: bool = False) -> float: return x",
    "a kernel with an argument of its own": (
        "@implements(scaled)\ndef a(x: float, factor: float, *, wide: bool = False, gpu: str = '') -> float: return x"
    ),
    "a bound call": "a: float = OpTable([scaled]).bind(scaled, OpRequest())(1.0, factor=2.0, wide=True)",
    "the reference": "a: float = scaled(1.0, 2.0)",
}
WRONG = {
    "a parameter of another name": (
        "@implements(scaled)\ndef a(x: float, by: float, *, wide: bool = False) -> float: return x"
    ),
    "a parameter of another type": (
        "@backend_for(scaled)\ndef a(x: float, factor: str, *, wide: bool = False) -> float: return x"
    ),
    "a parameter too few": "@implements(scaled)\ndef a(x: float, factor: float) -> float: return x",
    "a parameter too many": (
        "@backend_for(scaled)\ndef a(x: float, factor: float, y: int, *, wide: bool = False) -> float: return x"
    ),
    "another result": "@implements(scaled)\ndef a(x: float, factor: float, *, wide: bool = False) -> str: return ''",
    "a bound call without an argument": "OpTable([scaled]).bind(scaled, OpRequest())(1.0)",
    "a call with an argument of another type": "scaled(1.0, '2')",
    "a name instead of an op": "OpTable([scaled]).bind('scaled', OpRequest())(1.0, 2.0)",
}


@pytest.fixture(scope="module")
def wrong_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is wrong with each snippet, all in one run; torch is not looked at."""
    folder = tmp_path_factory.mktemp("typed")
    path, begins = folder / "snippets.py", {}
    text = BEGINNING
    for i, (name, code) in enumerate({**RIGHT, **WRONG}.items()):
        begins[text.count("\n") + 1] = name
        text += re.sub(r"\ba\b(?=[(:])", f"a{i}", code) + "\n"
    path.write_text(text)
    modules = [SOURCES / "quire_ops" / name for name in ("op.py", "table.py")]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=skip", "--allow-subclassing-any"]
    command += [
        "--no-warn-return-any",
        "--no-warn-unused-ignores",
        f"--cache-dir={folder}",
        *map(str, modules),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCES)
    errors = {}
    for line, message in re.findall(r"^\S*snippets\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        errors[begins[max(begin for begin in begins if begin <= int(line))]] = message
    assert errors, done.stdout + done.stderr
    return errors


@pytest.mark.parametrize("name", RIGHT)
def test_what_fits_is_taken(wrong_lines: dict[str, str], name: str) -> None:
    assert wrong_lines.get(name) is None


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(wrong_lines: dict[str, str], name: str) -> None:
    assert wrong_lines.get(name)
