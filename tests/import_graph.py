"""Who imports whom in this workspace, read from the sources.

`python tests/import_graph.py` writes it into docs/architecture.md, and draws docs/architecture.svg.

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
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
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
WIDTH, MARGIN, GAP, ROW_HEIGHT, BOX_WIDTH, BOX_HEIGHT, MAX_IN_ROW = 1040, 12, 14, 62, 132, 28, 7
"""Of the picture, in its own units."""
STYLE = """<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>
<style>
svg{background:#fff;font:13px system-ui,sans-serif}
.floor{fill:#f3f5f8;stroke:#d4dae2}.title{fill:#57606a;font-size:12px}
.box{fill:#fff;stroke:#57606a}g text{fill:#1f2328;text-anchor:middle}
path{fill:none;stroke:#6b7f99;stroke-width:1.2;marker-end:url(#tip)}.tip{fill:#6b7f99;stroke:none}
@media (prefers-color-scheme:dark){svg{background:#0d1117}.floor{fill:#161b22;stroke:#30363d}.title{fill:#9da7b3}
.box{fill:#0d1117;stroke:#8b949e}g text{fill:#e6edf3}path{stroke:#7d8fa9}.tip{fill:#7d8fa9}}
</style>"""
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
                    yield Import(module, name, child.lineno, is_local)  # type: ignore[attr-defined]  # a statement
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


def picture(edges: Mapping[str, set[str]]) -> str:
    """The house as SVG: floors are bands, and of two packages of a band the one that imports the other stands above."""
    levels: dict[str, int] = {}

    def level(package: str) -> int:
        if package not in levels:
            levels[package] = 1 + max((level(below) for below in edges.get(package, ())), default=0)
        return levels[package]

    shapes: list[str] = []
    places: dict[str, tuple[float, float]] = {}
    top = MARGIN
    for title, packages in FLOORS.items():
        rows = [
            sorted(each for each in packages if level(each) == number)
            for number in sorted({level(each) for each in packages}, reverse=True)
        ]
        rows = [row[start : start + MAX_IN_ROW] for row in rows for start in range(0, len(row), MAX_IN_ROW)]
        height = 26 + len(rows) * ROW_HEIGHT
        shapes.append(
            f'<rect class="floor" x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="8"/>'
        )
        shapes.append(f'<text class="title" x="{MARGIN + 10}" y="{top + 18}">{title}</text>')
        for number, row in enumerate(rows):
            step = (WIDTH - 2 * MARGIN) / len(row)
            for column, package in enumerate(row):
                places[package] = (MARGIN + step * (column + 0.5), top + 26 + ROW_HEIGHT * (number + 0.5))
        top += height + GAP
    lines = []
    for package in sorted(edges):
        for below in sorted(edges[package]):
            (x1, y1), (x2, y2) = places[package], places[below]
            down = 1 if y2 > y1 else -1
            y1, y2 = y1 + down * BOX_HEIGHT / 2, y2 - down * (BOX_HEIGHT / 2 + 5)
            bend = (y2 - y1) / 2
            path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
            lines.append(f'<path d="{path}"><title>{_short(package)} imports {_short(below)}</title></path>')
    boxes = [
        f'<g><rect class="box" x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" '
        f'height="{BOX_HEIGHT}" rx="5"/><text x="{x:.0f}" y="{y + 4.5:.0f}">{_short(package)}</text></g>'
        for package, (x, y) in places.items()
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" '
        'aria-label="Which package imports which">'
    )
    return "\n".join([head, STYLE, *shapes, *lines, *boxes, "</svg>"]) + "\n"


def _short(package: str) -> str:
    return package.removeprefix("quire_")


def drawing(edges: Mapping[str, set[str]]) -> str:
    """What the page shows: the picture, and the same in words."""
    rows = [
        f"| {_short(package)} | {', '.join(map(_short, sorted(edges[package])))} |"
        for packages in FLOORS.values()
        for package in packages
        if edges.get(package)
    ]
    image = f"![Which package imports which]({PICTURE.name})"
    return "\n".join([image, "", "| package | imports |", "|---|---|", *rows]) + "\n"


def with_drawing(page: str, text: str) -> str:
    """The page with `text` in the place of its drawing."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}{END}{after}"


if __name__ == "__main__":
    edges_of_today = package_edges(all_imports())
    PAGE.write_text(with_drawing(PAGE.read_text(), drawing(edges_of_today)))
    PICTURE.write_text(picture(edges_of_today))
