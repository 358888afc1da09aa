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

API_MODULES, API_LIBRARIES = 570, {
    "annotated_doc", "annotated_types", "anyio", "brotli", "click", "fastapi", "h11", "httptools", "jinja2",
    "markupsafe", "msgspec", "opentelemetry", "prometheus_client", "pydantic", "pydantic_core", "python_multipart",
    "sniffio", "starlette", "tokenizers", "typing_extensions", "typing_inspection", "uvicorn", "uvloop", "websockets",
    "xxhash", "yaml", "zmq", "zstandard",
}  # fmt: skip
"""Most modules of ours in a process that answers HTTP for a model of text, and the libraries that it may import."""
ENGINE_MODULES, ENGINE_LIBRARIES = 610, {
    "cuda", "jinja2", "llguidance", "markupsafe", "msgspec", "numpy", "rich", "safetensors", "tokenizers", "torch",
    "torchgen", "tqdm", "triton", "typing_extensions", "xxhash", "zmq",
}  # fmt: skip
"""The same of a process with an engine, its tokenizer and its progress bar."""
ENGINE = """
import sys
from quire import LLM, SamplingParams
LLM(sys.argv[1], max_model_len=64).generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1))
print("all modules:", *sys.modules)
"""


def libraries(modules: Iterable[str]) -> set[str]:
    """Packages that are neither Python's nor ours, without their compiled parts and what sets Python up."""
    names = {each.split(".")[0] for each in modules if not is_ours(each)} - sys.stdlib_module_names
    return {each for each in names if not each.startswith("_")} - {"cython_runtime"}


def is_ours(module: str) -> bool:
    return module.split(".")[0].split("_")[0] == "quire"


def loaded(output: str) -> list[str]:
    """The modules that a program printed."""
    (line,) = [each for each in output.splitlines() if each.startswith("all modules:")]
    return line.split()[2:]


def test_a_server_imports_what_its_budget_allows(launch: Any) -> None:
    process = launch()
    process.url()
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    modules = loaded(process.output)
    assert libraries(modules) - API_LIBRARIES == set()
    assert sum(map(is_ours, modules)) <= API_MODULES


def test_an_engine_imports_what_its_budget_allows(tiny_folder: Path) -> None:
    program = [sys.executable, "-c", ENGINE, str(tiny_folder)]
    modules = loaded(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert libraries(modules) - ENGINE_LIBRARIES == set()
    assert sum(map(is_ours, modules)) <= ENGINE_MODULES
