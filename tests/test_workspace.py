"""What every member of the workspace must have."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]


@pytest.mark.parametrize("member", MEMBERS)
def test_member_is_complete(member: str) -> None:
    folder = ROOT / member
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (package,) = (folder / "src").glob("*/__init__.py")
    names = {
        target.id: node.value
        for node in ast.parse(package.read_text()).body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    version = names["__version__"]
    assert isinstance(version, ast.Constant)
    assert version.value == project["version"], "the module and pyproject.toml disagree on the version"
    assert "__all__" in names
    assert (package.parent / "py.typed").is_file()
    assert f"## {project['version']}" in (folder / "CHANGELOG.md").read_text()
    assert list((folder / "tests").glob("test_*.py")), "no tests"
    assert project["license-files"] == ["LICENSE"]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    readme = (folder / "README.md").read_text()
    assert re.search(r"```(python|sh)\n", readme), "the README has no example"


@pytest.mark.parametrize("member", MEMBERS)
def test_siblings_are_required_as_ranges(member: str) -> None:
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]
    extras = [name for extra in project.get("optional-dependencies", {}).values() for name in extra]
    for requirement in [*project["dependencies"], *extras]:
        if requirement.startswith("quire") and not requirement.startswith(f"{project['name']}["):
            assert re.fullmatch(r"[a-z-]+(\[[a-z,]+\])?>=\d+\.\d+(\.\d+)?,<\d+", requirement), requirement


def test_pins_name_no_index() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert text.count("--hash=sha256:") > 100


def test_the_workspace_runs_on_the_pinned_versions() -> None:
    """`uv run` resolves anew, with the constraints in pyproject.toml; that gives what requirements.lock pins."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = [line.removesuffix(" \\") for line in lines if not line.startswith(" ")]
    constraints = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    assert constraints == pinned, "requirements.lock and pyproject.toml differ: run nox -s lock"
    pins = [Requirement(line) for line in pinned]
    assert len(pins) > 100
    installed = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}
    others = []
    for pin in pins:
        if pin.name in installed and (pin.marker is None or pin.marker.evaluate()):
            version = Version(importlib.metadata.version(pin.name))
            if not pin.specifier.contains(version.public, prereleases=True):
                others.append(f"{pin} is pinned, {version} is here")
    assert others == []
