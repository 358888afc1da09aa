"""The documentation hangs together: links lead somewhere, and every page has a place on the site (mkdocs.yml)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

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
