"""A GGUF file opened as a folder: config.json and tokenizer written beside a link to it. Free of torch.

Everything that reads checkpoints reads folders; so a file's metadata is written once, as the files that it was made
from, into the user's cache, and found there by the file's place, size and time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, read_json
from quire_models.gguf.config import config_values
from quire_models.gguf.header import GgufHeader, first_part, read_header
from quire_models.gguf.tokenizer import tokenizer_files

__all__ = ["GGUF_NAME", "gguf_folder", "unread_metadata"]

GGUF_NAME = "model.gguf"
"""Of the link in the folder."""
_VERSION = "4"
"""Of what is written; another one makes a new folder."""
_UNREAD = "unread_metadata.json"
"""Names of metadata of which nothing was made, to be named in the report at each start."""
_ABOUT = (
    "split.*",
    "quantize.*",
    "tokenizer.huggingface.json",
    "tokenizer.ggml.token_type_count",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.*_token_id",
)
"""Metadata that makes no difference where it was not read: markers for filling in are known by their texts."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys behind general.sampling -> fields of generation_config.json."""


def gguf_folder(file: Path) -> Path:
    """The folder of a GGUF file, written when there is none yet.

    Raises:
        CheckpointError: Not a GGUF file that can be read, or no place to write to.
    """
    file = first_part(file.absolute())
    if not file.is_file():
        raise CheckpointError(f"{file.parent} lacks {file.name}; download all parts of the file")
    status = file.stat()
    identity = f"{_VERSION}\0{file}\0{status.st_size}\0{status.st_mtime_ns}"
    folder = _cache() / hashlib.sha256(identity.encode()).hexdigest()[:24] / file.stem
    if (folder / GGUF_NAME).exists():
        return folder
    header = read_header(file)
    contents = {"config.json": config_values(header), **tokenizer_files(header)}
    if sampling := _sampling(header):
        contents["generation_config.json"] = sampling
    contents[_UNREAD] = {"names": _unread(header)}
    try:
        _write(folder, contents, file)
    except OSError as error:
        raise CheckpointError(
            f"cannot write what {file} says about itself into {folder}: {error}; set XDG_CACHE_HOME to a folder that "
            "can be written to"
        ) from error
    return folder


def unread_metadata(folder: Path) -> tuple[str, ...]:
    """Names of metadata of which nothing was made, of a folder made from a GGUF file; nothing for others."""
    path = folder / _UNREAD
    return tuple(read_json(path)["names"]) if path.is_file() and (folder / GGUF_NAME).exists() else ()


def _sampling(header: GgufHeader) -> dict[str, Any]:
    """Defaults of sampling that the file names, as generation_config.json has them."""
    found = {name: header.fields.number(f"general.sampling.{key}", default=None) for key, name in _SAMPLING.items()}
    values = {name: value for name, value in found.items() if value is not None}
    return values if "top_k" not in values else {**values, "top_k": header.fields.integer("general.sampling.top_k")}


def _unread(header: GgufHeader) -> tuple[str, ...]:
    """Metadata that is set and of which nothing was made; what describes the file or its making aside."""
    fields = header.fields
    about = (name for name in header.metadata if name.startswith("general.") and ".sampling." not in name)
    fields.skip(*_ABOUT, *about)
    return tuple(fields.unread())


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "gguf"


def _write(folder: Path, contents: dict[str, Any], file: Path) -> None:
    """In one move, so that another process finds all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, content in contents.items():
            (made / name).write_text(json.dumps(content), encoding="utf-8")
        (made / GGUF_NAME).symlink_to(file)
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / GGUF_NAME).exists():  # another process may have been faster
            raise
