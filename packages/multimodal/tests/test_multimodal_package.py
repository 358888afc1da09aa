"""The package as a whole: its README's example, what importing it loads, its names, its settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire_multimodal
from quire_interfaces import ConfigError
from quire_multimodal import MediaConfig

README = Path(__file__).parents[1] / "README.md"


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_readme_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert python(block) == "What is <start><image><image><image><end>? 2 3 False\n"


def test_import_loads_only_what_it_needs() -> None:
    loaded = python("from quire_multimodal import MediaPreparer; import sys; print(*sys.modules)").split()
    ours = {name.split(".")[0] for name in loaded if name.startswith("quire_")}
    assert ours == {"quire_multimodal", "quire_interfaces"}
    assert not {"torch", "transformers", "av", "soundfile", "soxr", "msgspec", "pydantic"} & set(loaded)


def test_all_names_exist() -> None:
    for name in quire_multimodal.__all__:
        assert getattr(quire_multimodal, name).__doc__


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit_mm_per_prompt", {"smell": 1}),
        ("limit_mm_per_prompt", {"image": -1}),
        ("limit_mm_per_prompt", 3),
        ("mm_processor_kwargs", "fast"),
        ("mm_processor_cache_gb", -1),
        ("media_processes", 0),
        ("media_niceness", 20),
        ("allow_private_media_addresses", "yes"),
    ],
)
def test_settings_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} must "):
        MediaConfig(**{field: value})


def test_a_modality_may_be_forbidden() -> None:
    assert MediaConfig(limit_mm_per_prompt={"image": 0}).limit_mm_per_prompt == {"image": 0}
