"""Where adapters that requests name may come from: below one folder, or from the hub, as the operator says.

Whatever cannot be had gets the same answer, so that no request finds out which paths exist.
"""

from __future__ import annotations

import os
import re
import reprlib
from pathlib import Path

from quire_interfaces import RequestError
from quire_server.config import ServerConfig

__all__ = ["allowed_adapter"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
MAX_FILES = 1000


def allowed_adapter(place: str, config: ServerConfig) -> str:
    """The adapter's folder with all links followed, or its hub name. Reads folders: not for the event loop.

    Args:
        place: What a request gives: a path, also one relative to the allowed folder, or a hub name.

    Raises:
        RequestError: it may not be read, or it is not there.
    """
    folder = _folder(place, config.allowed_local_lora_path)
    if folder is not None:
        return str(folder)
    # A folder of that name, relative to where the server runs, would be read first.
    if config.allow_lora_from_hub and HUB_NAME.fullmatch(place) and not os.path.lexists(place):
        return place
    raise RequestError(
        f"there is no adapter {reprlib.repr(place)} that requests may load: its folder must lie below "
        "--allowed-local-lora-path, or it is a hub name and the server was started with --allow-lora-from-hub",
        param="lora_path",
        code="adapter_not_found",
    )


def _folder(place: str, allowed: str | None) -> Path | None:
    """The folder, if it and the files in it lie below the allowed one, wherever links lead."""
    if allowed is None:
        return None
    try:
        root = Path(allowed).expanduser().resolve(strict=True)
        folder = (root / place).resolve(strict=True)  # an absolute place stands for itself
        if not folder.is_relative_to(root):
            return None
        with os.scandir(folder) as entries:
            files = [entry.path for entry, _ in zip(entries, range(MAX_FILES), strict=False)]
        if not any(Path(file).name == "adapter_config.json" for file in files):
            return None
        if not all(os.access(file, os.R_OK) and Path(file).resolve(strict=True).is_relative_to(root) for file in files):
            return None
    except (OSError, ValueError, RuntimeError):  # not there, not readable, a null byte, links in a circle
        return None
    return folder
