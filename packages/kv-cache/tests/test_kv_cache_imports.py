"""Importing is cheap and brings no tensor library; the public names are the documented ones; the README runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import quire_kv_cache

README = Path(__file__).parents[1] / "README.md"


def python(code: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_loads_only_what_it_needs() -> None:
    loaded = python("import quire_kv_cache, sys; print(*sys.modules)").split()
    assert "quire_kv_cache.manager" in loaded
    ours = {name.split(".")[0] for name in loaded if name.startswith("quire_") or name == "quire"}
    assert ours == {"quire_kv_cache", "quire_interfaces"}
    assert not {"torch", "numpy", "cbor2", "msgspec", "pydantic"} & set(loaded)


def test_cbor_is_loaded_on_demand() -> None:
    code = (
        "import quire_kv_cache as k, sys; k.hash_blocks([1], 1, algorithm='sha256_cbor'); print('cbor2' in sys.modules)"
    )
    assert python(code).strip() == "True"


def test_import_is_quick(tmp_path: Path) -> None:
    code = (
        "import quire_interfaces, time; a = time.process_time(); import quire_kv_cache; print(time.process_time() - a)"
    )
    # Processor time, and one good run is enough: other work on the machine slows an import, nothing quickens it. The
    # first run compiles the modules, also where the environment says that what is compiled shall not be kept.
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert any(float(python(code, **kept)) < 0.03 for _ in range(10))


def test_public_names_are_there() -> None:
    assert sorted(quire_kv_cache.__all__, key=lambda name: (name[0].islower(), name)) == [
        "AllocatorMisuseError",
        "BlockHasher",
        "GROUP_POLICIES",
        "GroupPolicy",
        "KVCacheConfig",
        "KVCacheManager",
        "NoKVCache",
        "PrefixCacheStats",
        "hash_blocks",
        "kv_plan_of_layers",
        "max_concurrency",
        "plan_kv_cache",
        "state_block_size",
    ]
    for name in quire_kv_cache.__all__:
        assert hasattr(quire_kv_cache, name)


def test_readme_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        python(block)
