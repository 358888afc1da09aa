"""What the headers of a checkpoint's files say and its config.json does not. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError

__all__ = ["has_tensor", "stored_linears"]


def stored_linears(folder: Path, vocab_size: int) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of every matrix that may be a linear layer's; embeddings, LM head and routed experts aside."""
    return tuple(
        (entry["shape"][0], entry["shape"][1])
        for name, entry in _headers(folder)
        if name.endswith(".weight") and ".experts." not in name and "embed" not in name
        if len(entry["shape"]) == 2 and entry["shape"][0] != vocab_size
    )


def has_tensor(folder: Path, name: str) -> bool:
    """Whether a file of the checkpoint has a tensor of this name; False where there are no files yet."""
    return any(found == name for found, _ in _headers(folder))


def _headers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of each tensor, and what is said of it: "dtype", "shape". CheckpointError: a file cannot be read."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; download the file again") from error
        yield from ((name, entry) for name, entry in header.items() if name != "__metadata__")
