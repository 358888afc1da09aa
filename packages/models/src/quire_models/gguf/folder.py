"""A GGUF file opened as a folder: config.json and tokenizer written beside a link to it. Free of torch.

Everything that reads checkpoints reads folders; so a file's metadata is written once, as the files that it was made
from, into the user's cache, and found there by the file's place, size and time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, read_json
from quire_models.gguf.config import config_values
from quire_models.gguf.header import GgufHeader, first_part, read_header
from quire_models.gguf.tokenizer import tokenizer_files
from quire_models.made_folder import made_folder, write_made_folder

__all__ = ["GGUF_NAME", "gguf_folder", "unread_metadata"]

GGUF_NAME = "model.gguf"
"""Of the link in the folder."""
_VERSION = "5"
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
    folder = made_folder("gguf", _VERSION, [file], file.stem)
    if (folder / GGUF_NAME).exists():
        return folder
    header = read_header(file)
    contents = {"config.json": config_values(header), **tokenizer_files(header)}
    if sampling := _sampling(header):
        contents["generation_config.json"] = sampling
    contents[_UNREAD] = {"names": _unread(header)}
    write_made_folder(folder, contents, {GGUF_NAME: file}, GGUF_NAME)
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
