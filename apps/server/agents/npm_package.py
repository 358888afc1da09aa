"""Agents from the npm registry, in the versions and with the contents that their lock files name; no script of theirs
runs when they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["NoAgentError", "install"]

_INSTALL_S = 300


class NoAgentError(Exception):
    """Node or the registry cannot be had."""


def install(lock_folder: Path, into: Path) -> Path:
    """Install what `package-lock.json` of a folder names; the folder of its programs.

    Raises:
        NoAgentError: it cannot be had here.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise NoAgentError("there is no npm; install Node.js 20 or newer")
    into.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(lock_folder / name, into)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", str(into / "cache")]
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoAgentError(f"npm needed more than {_INSTALL_S} s") from None
    if done.returncode != 0:
        raise NoAgentError(f"npm cannot install {lock_folder.name}: {done.stderr.strip()[-600:]}")
    return into / "node_modules" / ".bin"
