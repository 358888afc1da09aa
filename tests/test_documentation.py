"""The documentation hangs together: links lead somewhere, and every page has a place on the site (mkdocs.yml)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import quire_server.cli  # noqa: F401 - it fills the table of commands
from quire.setting_fields import config_fields
from quire_interfaces import ConfigError
from quire_server.command_line import settings_from
from quire_server.commands import COMMANDS, server_sections

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "*.md", "docs/**/*.md", "deploy/**/*.md", "examples/**/*.md", "packages/*/*.md", "kernels-*/*.md", "apps/*/*.md",
)  # fmt: skip
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> Iterator[str]:
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path))):
        if not re.match(r"[a-z]+:", target):
            yield target


@cache
def anchors(path: Path) -> frozenset[str]:
    """Of each heading what GitHub and the site call it."""
    names: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?) *#*$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")
        names[name] = names.get(name, 0) + 1
    return frozenset(names)


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for link in links(page):
        place, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / place)) if place else page
        is_known = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
        if not is_known:
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One, two\n\n```\n# three\n```\n## `four_five`: [six](x)\n")
    good = "[x](b.md) [x](b.md#one-two) [x](b.md#four_five-six) [x](#head) [x](https://nowhere) `[x](none.md)`"
    fenced = "```\n[x](none.md)\n```\n"
    (tmp_path / "a.md").write_text(f"# Head\n\n{good}\n{fenced}[x](none.md) [x](b.md#three) [x](#tail)\n")
    assert broken(tmp_path / "a.md") == ["none.md", "b.md#three", "#tail"]


class _Loader(yaml.SafeLoader):
    """Reads what names Python objects as nothing: MkDocs alone makes them."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)


def test_every_page_has_a_place_on_the_site() -> None:
    navigation = list(_leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    assert sorted(navigation) == sorted(set(navigation))
    pages = {path.relative_to(ROOT).as_posix() for path in PAGES}
    assert set(navigation) - pages == set()
    assert pages - set(navigation) == {each for each in pages if re.search(r"/CHANGELOG\.md$", each)}


def test_every_page_of_docs_is_in_the_table_of_contents() -> None:
    contents = ROOT / "docs" / "README.md"
    listed = {Path(os.path.normpath(contents.parent / link.partition("#")[0])) for link in links(contents)}
    assert set((ROOT / "docs").glob("*.md")) - listed == {contents}


def command_lines(page: Path) -> Iterator[str]:
    """Commands of `quire` in a page's blocks of shell, but those with places to fill in."""
    for block in re.findall(r"^```(?:sh|bash|shell)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        joined: list[str] = []
        for line in block.replace("\\\n", " ").splitlines():
            if joined and joined[-1].partition(" #")[0].count("'") % 2:  # a value over two lines
                joined[-1] += f" {line}"
            else:
                joined.append(line)
        for line in joined:
            match = re.match(r"(?:uv run )?(quire [a-z].*)", line.strip())
            if match and not re.search(r"[\[<|&>$]|\.\.\.", match[1]):
                yield match[1]


def wrong_command(line: str) -> str:
    """What is wrong with a command line of `quire`; empty for nothing, and for commands of other packages."""
    _, name, *arguments = shlex.split(line, comments=True)
    if name not in COMMANDS:
        return "" if name in ("bench", "make-model", "new-model", "new-op", "verify") else f"no command {name}"
    command = COMMANDS[name]
    sections = command.sections() if command.sections is not None else {}
    said = io.StringIO()
    if any(each == "--help" or each.startswith("--help=") for each in arguments):
        return ""
    try:
        with contextlib.redirect_stderr(said):
            settings_from(command.parser(name), arguments, sections)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return said.getvalue()
    return ""


def test_commands_of_every_page_are_understood() -> None:
    lines = {(page.name, line) for page in PAGES for line in command_lines(page)}
    assert len(lines) > 40
    assert {(*each, wrong) for each in lines if (wrong := wrong_command(each[1]))} == set()


def test_wrong_commands_are_found() -> None:
    assert "--max-num-seqs" in wrong_command("quire serve --max-num-sequences 3")
    assert "whole number" in wrong_command("quire plan --max-num-seqs three  # of them")
    assert "no command" in wrong_command("quire sevre")
    assert wrong_command("quire serve model --max-num-seqs 3 -tp 2") == ""


@pytest.mark.parametrize("door", ["vllm", "ollama", "llama-cpp", "sglang"])
def test_flags_of_the_guides_are_ours(door: str) -> None:
    """Of tables that have another engine's commands and flags on the left and Quire's on the right."""
    known = {spec.flag for spec in config_fields(server_sections()).values()} | {"--speculative-config"}
    known |= {f"--no-{flag[2:]}" for flag in known}
    known |= {name for command in COMMANDS.values() for each in command.arguments for name in each.names}
    page = (ROOT / "docs" / f"coming-from-{door}.md").read_text()
    tables = re.findall(r"^\| [\w.]+ \| Quire \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    rights = [row.rsplit(" | ", 1)[1] for table in tables for row in table.splitlines()]
    codes = [code for right in rights for code in re.findall(r"`([^`]*)`", right)]
    flags = {flag for code in codes for flag in re.findall(r"(?<!\S)--[a-z-]+", code)}
    assert len(tables) >= 2
    assert len(flags) >= 5
    assert flags - known == set()
