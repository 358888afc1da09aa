"""The linear layers of a checkpoint whose network only Transformers knows, from its files' headers. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["stored_linears"]


def stored_linears(folder: Path, vocab_size: int) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of every matrix that may be a linear layer's; embeddings, LM head and routed experts aside."""
    shapes = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes += [
            (entry["shape"][0], entry["shape"][1])
            for name, entry in header.items()
            if name.endswith(".weight") and ".experts." not in name and "embed" not in name
            if len(entry["shape"]) == 2 and entry["shape"][0] != vocab_size
        ]
    return tuple(shapes)
