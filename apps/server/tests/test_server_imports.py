"""What a start may import: a start costs little else, and each library that slips in is paid by every one of them.

Counts, not times: the modules of ours, and the libraries by name. Whoever adds one knowingly changes the budget here.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

API_MODULES, API_LIBRARIES = 590, {
    "annotated_doc", "annotated_types", "anyio", "brotli", "click", "fastapi", "h11", "httptools", "jinja2",
    "markupsafe", "msgspec", "opentelemetry", "prometheus_client", "pydantic", "pydantic_core", "python_multipart",
    "sniffio", "starlette", "tokenizers", "typing_extensions", "typing_inspection", "uvicorn", "uvloop", "websockets",
    "xxhash", "yaml", "zmq", "zstandard",
}  # fmt: skip
"""Most modules of ours in a process that answers HTTP for a model of text, and the libraries that it may import."""
ENGINE_MODULES, ENGINE_LIBRARIES = 632, {
    "cuda", "jinja2", "llguidance", "markupsafe", "msgspec", "numpy", "rich", "safetensors", "tokenizers", "torch",
    "torchgen", "tqdm", "triton", "typing_extensions", "xxhash", "zmq",
}  # fmt: skip
"""The same of a process with an engine, its tokenizer and its progress bar."""
ENGINE = """
import pathlib, sys
from quire import LLM, SamplingParams
LLM(sys.argv[1], max_model_len=64).generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1))
pathlib.Path(sys.argv[2]).write_text(" ".join(sys.modules))
"""


def libraries(modules: Iterable[str]) -> set[str]:
    """Packages that are neither Python's nor ours, without their compiled parts and what sets Python up."""
    names = {each.split(".")[0] for each in modules if not is_ours(each)} - sys.stdlib_module_names
    return {each for each in names if not each.startswith("_")} - {"cython_runtime"}


def is_ours(module: str) -> bool:
    return module.split(".")[0].split("_")[0] == "quire"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program writes the names of its modules."""
    monkeypatch.setenv("MODULES_FILE", str(tmp_path / "modules"))
    return tmp_path / "modules"


def test_a_server_imports_what_its_budget_allows(launch: Any, file: Path) -> None:
    process = launch()
    process.url()
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    modules = file.read_text().split()
    assert libraries(modules) - API_LIBRARIES == set()
    assert sum(map(is_ours, modules)) <= API_MODULES


def test_an_engine_imports_what_its_budget_allows(tiny_folder: Path, file: Path) -> None:
    subprocess.run([sys.executable, "-c", ENGINE, str(tiny_folder), str(file)], check=True)
    modules = file.read_text().split()
    assert libraries(modules) - ENGINE_LIBRARIES == set()
    assert sum(map(is_ours, modules)) <= ENGINE_MODULES
