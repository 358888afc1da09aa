"""The package as a whole: its README's example, what importing it loads, its names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire_kv_transfer
from quire_interfaces import ConfigError
from quire_kv_transfer import KVTransferConfig

README = Path(__file__).parents[1] / "README.md"


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_readme_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert python(block) == "arrived: [True] equal: True\n"


def test_import_loads_only_what_it_needs() -> None:
    loaded = python("import quire_kv_transfer, sys; print(*sys.modules)").split()
    ours = {name.split(".")[0] for name in loaded if name.startswith("quire_")}
    assert ours == {"quire_kv_transfer", "quire_interfaces"}
    assert not {"torch", "numpy", "msgspec", "pydantic"} & set(loaded)


def test_all_names_exist() -> None:
    for name in quire_kv_transfer.__all__:
        assert name in ("MAX_DEVICE_STORE_BYTES", "MAX_STORE_BYTES") or getattr(quire_kv_transfer, name).__doc__


def test_settings() -> None:
    assert KVTransferConfig().kv_disk_path is None
    assert KVTransferConfig(kv_disk_path="x", kv_disk_size=5).kv_disk_size == 5
    with pytest.raises(ConfigError, match="kv_disk_size must be"):
        KVTransferConfig(kv_disk_size=0)
