"""Packages of plug-ins for tests, as a package manager would leave them: without network, pip and build."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire_ops import backends

__all__ = ["install_package", "on_path", "write_metadata"]


def write_metadata(folder: Path, name: str, points: Mapping[str, Mapping[str, str]], version: str = "1.0") -> None:
    """Leave the metadata of a package in a folder of `sys.path`.

    Args:
        name: Of the package.
        points: Group -> name of an entry point -> "module:object".
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{point} = {place}" for point, place in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_package(project: Path, folder: Path) -> str:
    """Copy the modules of a project (pyproject.toml, src/) into a folder of `sys.path`, with their metadata; the
    project's name."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    shutil.copytree(project / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_metadata(folder, table["name"], table["entry-points"], table["version"])
    return str(table["name"])


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Within it, what is in the folder is installed in this process: nothing found before stays in the table of ops,
    and no module of the folder's is left imported."""
    sys.path.insert(0, str(folder))
    backends._installed_table.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.path_importer_cache.pop(str(folder), None)
        backends._installed_table.cache_clear()
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]
