"""Folders that stand for checkpoints of other formats: what these say as config.json, beside links to their files.

They lie in the user's cache, and are found there by the place, size and time of the files. Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError

__all__ = ["CTRANSLATE2", "PARAMS", "WEIGHTS", "is_mistral_format", "made_folder", "write_made_folder"]

CTRANSLATE2 = "model.ctranslate2"
"""Of the link to weights in the format of CTranslate2."""
PARAMS = "params.json"
WEIGHTS = "consolidated*.safetensors"
"""What a folder in Mistral AI's own format has; `mistral_format`, which most starts do not need, reads it."""


def made_folder(kind: str, version: str, files: Iterable[Path], name: str) -> Path:
    """Where the folder for these files is, or will be.

    Args:
        kind: The format.
        version: Of what is written; another one makes a new folder.
        files: Absolute paths.
        name: Of the folder itself.
    """
    stamps = ((file, file.stat()) for file in files)
    parts = [version, *(f"{file}\0{status.st_size}\0{status.st_mtime_ns}" for file, status in stamps)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / kind
    return cache / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24] / name


def write_made_folder(folder: Path, contents: Mapping[str, Any], links: Mapping[str, Path], mark: str) -> None:
    """Write the folder in one move, so that another process finds all or nothing.

    Args:
        contents: Name -> content of the JSON files.
        links: Name -> file that it links to.
        mark: Name of a file that says that the folder is there.

    Raises:
        CheckpointError: There is no place to write to.
    """
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, content in contents.items():
            (made / name).write_text(json.dumps(content), encoding="utf-8")
        for name, path in links.items():
            (made / name).symlink_to(path)
        made.rename(folder)
    except OSError as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if (folder / mark).exists():  # another process was faster
            return
        raise CheckpointError(
            f"cannot write what {next(iter(links.values()))} says about itself into {folder}: {error}; set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from error


def is_mistral_format(folder: Path) -> bool:
    """Whether a folder has its weights in this format, and in no other."""
    return (folder / PARAMS).is_file() and _is_alone(folder)


def _is_alone(folder: Path) -> bool:
    is_other = (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file()
    return not is_other and any(folder.glob(WEIGHTS))
