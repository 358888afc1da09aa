"""Functions of at most 100 lines, no class of many attributes without a reason, and a core of a known size."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for pattern in ("packages/*/src", "apps/*/src", "kernels-*/src") for path in ROOT.glob(f"{pattern}/**/*.py")
)
MOST_LINES = 100
"""Lines of a function, its docstring included."""
MOST_ATTRIBUTES = 20
"""Attributes of a class; more need a comment right above it that begins with REASON."""
REASON = "# Many attributes:"


def test_no_function_is_longer_than_a_hundred_lines() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 4000
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that methods of the class assign on `self`."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def test_a_class_of_many_attributes_says_why() -> None:
    silent = []
    for path in SOURCES:
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and len(names := attributes(node)) > MOST_ATTRIBUTES:
                above = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 2
                while above >= 0 and lines[above].startswith("#") and not lines[above].startswith(REASON):
                    above -= 1
                if not lines[above].startswith(REASON):
                    silent.append(f"{path.relative_to(ROOT)}: {node.name} has {len(names)}")
    assert silent == []


def test_the_core_stays_small() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests/core_size.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    *packages, _, total = done.stdout.splitlines()[-24:]
    size, limit = int(total.split()[0]), int(total.split()[-1])
    assert 5_000 < size < limit == 10_000, done.stdout
    assert any(line.endswith("quire_scheduler") for line in packages)
