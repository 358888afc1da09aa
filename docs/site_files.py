"""Hook of MkDocs (mkdocs.yml): the pages of the site are the Markdown files of the repository, where they lie.

The site has the folders of the repository, so that links between docs/, the packages' READMEs and the root's are the
same on the site as in a checkout. Files that pages link to and folders with a README are part of it, too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "deploy/README.md", "examples/**/README.md",
    "packages/*/*.md", "kernels-*/*.md", "apps/*/*.md",
)  # fmt: skip
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_files(files: Files, *, config: Any) -> Files:
    """The site's own files (theme) and those of the repository, under their paths in it."""
    paths = {path.relative_to(ROOT).as_posix(): path for pattern in PAGES for path in sorted(ROOT.glob(pattern))}
    linked: dict[str, Path] = {}
    for source, path in paths.items():
        for match in _LINK.finditer(path.read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
            if (ROOT / target).is_file() and target not in paths:
                linked[target] = ROOT / target
    found = [File.generated(config, source, abs_src_path=str(path)) for source, path in {**paths, **linked}.items()]
    found.append(File.generated(config, "site.css", abs_src_path=str(ROOT / "docs" / "site.css")))
    return Files([each for each in files if each.src_dir != config.docs_dir] + found)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links to a folder go to its README."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        to_readme = (ROOT / target / "README.md").is_file()
        return f"{match[1]}{match[2].rstrip('/')}/README.md{match[3] or ''}{match[4]}" if to_readme else match[0]

    return _LINK.sub(link, markdown)
