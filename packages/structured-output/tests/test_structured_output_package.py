"""The package as others see it: its example runs, it loads no torch, and settings are checked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire_structured_output
from quire_interfaces import ConfigError
from quire_structured_output import BACKENDS, StructuredOutputConfig, resolve_backend

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_readme_s_example_runs(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(compile(code, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "b'true'" in printed
    assert "b'x'" not in printed


def test_exported_names_exist():
    assert sorted(quire_structured_output.__all__) == quire_structured_output.__all__
    assert all(hasattr(quire_structured_output, name) for name in quire_structured_output.__all__)


def test_no_torch_and_no_library_before_it_is_needed():
    code = (
        "import sys, quire_structured_output; "
        "print(sorted({'torch', 'numpy', 'llguidance', 'outlines_core'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize(
    "values",
    [
        {"backend": "x"},
        {"timeout_s": 0},
        {"max_bytes": 1},
        {"cache_size": 0},
        {"num_workers": 0},
        {"max_jump_tokens": 65},
    ],
)
def test_wrong_settings_are_named(values):
    with pytest.raises(ConfigError) as error:
        StructuredOutputConfig(**values)
    assert error.value.field == next(iter(values))


def test_backends_by_name(monkeypatch):
    assert resolve_backend("auto") == "llguidance"
    with pytest.raises(ConfigError, match="llguidance, outlines"):
        resolve_backend("xgrammar")
    monkeypatch.setitem(BACKENDS, "outlines", "a_library_that_nobody_has")
    with pytest.raises(ConfigError, match=r"quire-structured-output\[outlines\]"):
        resolve_backend("outlines")
