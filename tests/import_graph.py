"""Who imports whom in this workspace, read from the sources; `python tests/import_graph.py` draws docs/architecture.md.

Every import counts, wherever it stands: in a function, or for the type checker only. Imports by a name that is put
together (registries, entry points) do not.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by tests/import_graph.py -->\n", "<!-- end of the drawing -->\n"

FLOORS = {
    "On top": ("quire_server", "quire_bench", "quire"),
    "Policy: plans a step, knows no tensors": (
        "quire_engine", "quire_scheduler", "quire_kv_cache", "quire_kv_transfer", "quire_renderers",
        "quire_structured_output", "quire_multimodal", "quire_speech", "quire_observability",
    ),
    "Tensors: computes a step": (
        "quire_runner", "quire_spec_decode", "quire_models", "quire_attention", "quire_sampling",
        "quire_quantization", "quire_lora", "quire_pooling", "quire_ops", "quire_distributed",
    ),
    "Kernels: found by entry point": ("quire_kernels_cpu", "quire_kernels_cuda", "quire_kernels_rocm"),
    "Words that all share": ("quire_interfaces",),
}  # fmt: skip
"""Title of a floor -> its packages."""
LEFT_OUT = {"quire_testkit", "quire_demo_model"}
"""Packages that are not drawn: tools of developers, and files of a model."""


class Import(NamedTuple):
    """One import of a module of the workspace by another one."""

    importer: str
    imported: str
    line: int
    is_local: bool
    """In a function."""


def module_paths() -> dict[str, Path]:
    """Name -> file of every module of the workspace's members, without their tests and benchmarks."""
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    paths = {}
    for member in members:
        src = ROOT / member / "src"
        for path in src.rglob("*.py"):
            parts = path.relative_to(src).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports_in(module: str, source: str, modules: Mapping[str, Path] | set[str]) -> Iterator[Import]:
    """The imports of `modules` by the source of `module`."""

    def visit(node: ast.AST, is_local: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            match child:
                case ast.Import(names=aliases):
                    names = [alias.name for alias in aliases]
                case ast.ImportFrom(module=str(base), names=aliases, level=0):
                    full = [f"{base}.{alias.name}" for alias in aliases]
                    names = list(dict.fromkeys(name if name in modules else base for name in full))
            for name in names:
                if name in modules and name != module:
                    yield Import(module, name, child.lineno, is_local)  # type: ignore[attr-defined]
            yield from visit(child, is_local or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from visit(ast.parse(source), False)


def all_imports() -> list[Import]:
    """Every import of one module of the workspace by another one."""
    paths = module_paths()
    return [each for module, path in paths.items() for each in imports_in(module, path.read_text("utf-8"), paths)]


def find_circle(imports: list[Import]) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for each in imports:
        graph.setdefault(each.importer, set()).add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []


def package_edges(imports: list[Import]) -> dict[str, set[str]]:
    """Package -> packages that it imports, but for those that it also reaches through others."""
    edges: dict[str, set[str]] = {}
    for each in imports:
        importer, imported = each.importer.split(".")[0], each.imported.split(".")[0]
        edges.setdefault(importer, set())
        if importer != imported and not {importer, imported} & LEFT_OUT:
            edges[importer].add(imported)

    def reached(package: str) -> set[str]:
        below = edges.get(package, set())
        return below.union(*(reached(each) for each in below))

    return {package: below - set().union(*(reached(each) for each in below)) for package, below in edges.items()}


def drawing(edges: Mapping[str, set[str]]) -> str:
    """The house in Mermaid's notation."""
    lines = ["flowchart TD"]
    for number, (title, packages) in enumerate(FLOORS.items()):
        lines.append(f'  subgraph floor{number}["{title}"]')
        lines += [f"    {package}[{package.removeprefix('quire_')}]" for package in packages]
        lines.append("  end")
    for package in sorted(edges):
        lines += [f"  {package} --> {below}" for below in sorted(edges[package])]
    return "\n".join(["```mermaid", *lines, "```"]) + "\n"


def with_drawing(page: str, text: str) -> str:
    """The page with `text` in the place of its drawing."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_drawing(PAGE.read_text(), drawing(package_edges(all_imports()))))
