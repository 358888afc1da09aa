"""What a package imports is what its pyproject.toml declares, in both directions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]

DISTRIBUTIONS = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    "opentelemetry": "opentelemetry-sdk",
}
"""Modules -> the distribution that brings them, where it has another name."""
UNDECLARED = {
    "kernels-cuda": {"flash-attn", "flashinfer"},  # used where a machine has them; both need builds for its CUDA
    "packages/kv-transfer": {"mooncake"},  # its binaries need libraries that most machines lack
    "packages/llm": {"transformers"},  # which prepares images for the demo model
    "packages/models": {"timm"},  # towers of some classes of transformers
    "packages/testkit": {"timm"},  # cases of those classes, where it is there
}
"""Member -> what it looks for and does without."""
LOADED_BY_NAME = {
    "apps/server": {
        "quire-kernels-cpu", "quire-kernels-cuda", "quire-kernels-rocm",  # by entry points
        "httptools", "uvloop", "websockets",  # by uvicorn
        "opentelemetry-exporter-otlp-proto-http",  # one of several distributions of the namespace `opentelemetry`
    },
    "kernels-cuda": {"triton"},
    "packages/multimodal": {
        "av", "soundfile", "soxr",  # where a medium needs them
        "num2words", "torchvision",  # by processors of transformers
    },
}  # fmt: skip
"""Member -> what it declares because others load it for it."""
PROGRAMS = ROOT / "apps/bench/src/quire_bench/programs"
"""Run by the interpreters of other engines, with what those have."""


def imported_modules(source: str) -> set[str]:
    """Top-level modules that a source imports anywhere, by statement or by a literal name."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                modules.add(module)
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function), args=[ast.Constant(value=str(name)), *_]
            ):
                if function in ("import_module", "find_spec", "__import__"):
                    modules.add(name)
    return {module.split(".")[0] for module in modules} - sys.stdlib_module_names


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b as x\ndef f():\n  from c.d import e\n  import_module('g.h'); importlib.util.find_spec('i')\n"
    assert imported_modules(source + "from . import j\nimport os, k\n") == {"a", "c", "g", "i", "k"}


@pytest.mark.parametrize("member", MEMBERS)
def test_declared_dependencies_are_those_imported(member: str) -> None:
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    declared = requirement_names([*project["dependencies"], *(name for extra in extras.values() for name in extra)])
    (package,) = (path.parent for path in (ROOT / member / "src").glob("*/__init__.py"))
    modules: set[str] = set()
    for path in package.rglob("*.py"):
        if not path.is_relative_to(PROGRAMS):
            modules |= imported_modules(path.read_text())
    imported = {DISTRIBUTIONS.get(name, name.replace("_", "-").lower()) for name in modules - {package.name}}
    assert imported - declared - UNDECLARED.get(member, set()) == set(), "imported, not declared"
    unused = declared - imported - LOADED_BY_NAME.get(member, set()) - {project["name"]}
    assert unused == set(), "declared, not imported"


@pytest.mark.parametrize("member", MEMBERS)
def test_modules_without_which_a_package_does_not_import_are_required(member: str) -> None:
    """An extra is for what is imported when it is needed: the package itself imports without any."""
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]
    required = requirement_names(project["dependencies"])
    (init,) = (ROOT / member / "src").glob("*/__init__.py")
    modules = imported_modules(init.read_text()) - {init.parent.name}
    assert {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in modules} <= required
