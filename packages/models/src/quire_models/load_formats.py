"""Names of the ways in which weights come (`load_format`), vLLM's among them. Importing this module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces.settings import OneOf

__all__ = ["LOAD_FORMATS", "REFUSED_LOAD_FORMATS", "LoadFormat"]

LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "gguf", "mistral", "bitsandbytes", "runai_streamer", "dummy")
"""Where weights come from: the files that there are ("auto", "hf"), safetensors, PyTorch's own files, a GGUF file,
Mistral AI's own files (params.json, consolidated.safetensors), safetensors that bitsandbytes quantized, safetensors
read by the library `runai-model-streamer`, or a random generator."""

REFUSED_LOAD_FORMATS = {
    "fastsafetensors": "files go to GPUs through pinned memory, several read at once, with auto",
    "instanttensor": "files go to GPUs through pinned memory, several read at once, with auto",
    "npcache": "load the PyTorch files once with pt, or convert them to safetensors, which need no cache",
    "runai_streamer_sharded": "give the whole checkpoint to every rank, which reads its own part of it, with "
    "runai_streamer or auto",
    "sharded_state": "give the whole checkpoint to every rank, which reads its own part of it, with auto",
    "tensorizer": "its files are not read; keep the safetensors files that they were made from, which are mapped, "
    "not copied",
}
"""Name -> what to do instead."""


@dataclass(frozen=True, slots=True)
class LoadFormat(OneOf):
    """Check for a name of `LOAD_FORMATS`; of one that is refused it says what to do instead."""

    choices: tuple[Any, ...] = LOAD_FORMATS

    def __call__(self, value: Any) -> str | None:
        complaint = OneOf.__call__(self, value)
        instead = REFUSED_LOAD_FORMATS.get(value) if isinstance(value, str) else None
        return complaint if complaint is None or instead is None else f"{complaint} ({value} is not read: {instead})"
