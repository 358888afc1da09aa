"""The files of a checkpoint and the tensors in them, mapped: nothing is read before it is used.

Knows safetensors, and PyTorch's own files for those who ask for them; does not know networks.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_interfaces import CheckpointError, read_json
from quire_models.gguf.folder import GGUF_NAME
from quire_models.gguf.tensors import GgufCheckpoint
from quire_models.made_folder import CTRANSLATE2, WEIGHTS, is_mistral_format

if TYPE_CHECKING:
    from quire_models.ctranslate2.tensors import CTranslate2Checkpoint
    from quire_models.mistral_format.tensors import MistralCheckpoint

__all__ = ["CheckpointFiles", "open_checkpoint"]

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
_SHARD = re.compile(r"-\d+-of-\d+\.")
_RANK = re.compile(r"-TP-\d+\.")
MEDUSA = "medusa_lm_head"
"""What the one file of Medusa heads is called instead, with an ending for each kind of file."""


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of one checkpoint, in order of name."""

    files: tuple[Path, ...]
    pickled: bool = False
    """They are PyTorch's own, not safetensors."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors; of PyTorch's own files, which say nothing about it, the files'."""
        return sum(file.stat().st_size if self.pickled else _tensor_bytes(file) for file in self.files)

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Name and mapped tensor of everything in the checkpoint.

        Raises:
            CheckpointError: A file cannot be read, or holds something else than tensors.
        """
        for file in self.files:
            yield from _pickled_tensors(file) if self.pickled else _safe_tensors(file)


def open_checkpoint(
    folder: Path, *, pickled: bool = False
) -> CheckpointFiles | GgufCheckpoint | CTranslate2Checkpoint | MistralCheckpoint:
    """Find the files.

    Args:
        pickled: PyTorch's own files, which are refused unless they are asked for.

    Raises:
        CheckpointError: There are none, or the index names files that are not there.
    """
    if (folder / GGUF_NAME).is_file() and not pickled:
        return GgufCheckpoint(folder / GGUF_NAME)
    if (folder / CTRANSLATE2).is_file() and not pickled:
        from quire_models.ctranslate2.tensors import CTranslate2Checkpoint  # most starts do without

        return CTranslate2Checkpoint(folder / CTRANSLATE2)
    if is_mistral_format(folder) and not pickled:
        return _consolidated(folder)
    name = PICKLED if pickled else SAFETENSORS
    index = folder / f"{name}.index.json"
    if index.is_file():
        return CheckpointFiles(_indexed_files(index), pickled)
    if (folder / name).is_file():
        return CheckpointFiles((folder / name,), pickled)
    heads = folder / f"{MEDUSA}{'.pt' if pickled else '.safetensors'}"
    if heads.is_file():
        return CheckpointFiles((heads,), pickled)
    others = sorted(path.name for pattern in ("*.bin", f"{MEDUSA}.pt") for path in folder.glob(pattern))
    if others and not pickled and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has its weights as {', '.join(others)}, a format that can run code when it is read; convert it "
            "(load it with transformers and call save_pretrained(folder), which writes safetensors), or ask for it "
            "with load_format 'pt', which takes tensors only"
        )
    raise CheckpointError(f"{folder} has no weights: neither {name} nor {index.name}{_other_files(folder, name)}")


def _consolidated(folder: Path) -> MistralCheckpoint:
    """The files of Mistral's own format."""
    from quire_models.mistral_format.folder import INDEX  # most starts do without
    from quire_models.mistral_format.tensors import MistralCheckpoint

    listed = folder / INDEX
    files = _indexed_files(listed) if listed.is_file() else tuple(sorted(folder.glob(WEIGHTS)))
    return MistralCheckpoint(folder, CheckpointFiles(files))


def _other_files(folder: Path, name: str) -> str:
    """What there is instead, and what to do about it."""
    found = sorted(path.name for path in folder.glob(f"*{Path(name).suffix}"))
    if not found:
        return ""
    _refuse_parts_of_tensors(folder, found)
    if all(_SHARD.search(file) for file in found):
        return f", which says what is in {', '.join(found)}; get it, too"
    if len(found) == 1 and not found[0].startswith("consolidated"):
        return f", but {found[0]}; if it holds the whole model, rename it to {name}"
    return (
        f", but {', '.join(found)}; get the files that Transformers reads ({name}, or {name}.index.json with its parts)"
    )


def _refuse_parts_of_tensors(folder: Path, names: list[str]) -> None:
    """CheckpointError: files are parts for tensor-parallel ranks."""
    parts = [name for name in names if _RANK.search(name)]
    if parts:
        raise CheckpointError(
            f"{folder} has its tensors in parts, one for each tensor-parallel rank ({parts[0]} and others, as Grok 2 "
            "is published), which are not put together here: write a checkpoint with each tensor whole (w1, w3, "
            "gate_proj and up_proj joined along their outputs, w2 and down_proj along their inputs)"
        )


def _indexed_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of names to files; download the file again")
    outside = [name for name in weight_map.values() if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of this folder; do not use it")
    _refuse_parts_of_tensors(index.parent, sorted(weight_map.values()))
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index.parent} lacks {len(absent)} of the {len(files)} files that {index.name} names: "
            f"{', '.join(absent)}; download the checkpoint again"
        )
    return tuple(files)


def _tensor_bytes(file: Path) -> int:
    """A safetensors file's size without its header (8 bytes of length, then the header)."""
    with file.open("rb") as stream:
        header_len = int.from_bytes(stream.read(8), "little")
    return max(0, file.stat().st_size - 8 - header_len)


def _safe_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                yield name, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; download the file again") from error


def _pickled_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        # Tensors only: nothing in the file is called. Mapped, hence of the format since PyTorch 1.6.
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file fails wherever the unpickler stumbles: KeyError, AssertionError ...
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"cannot read {file}: {reason}; convert the checkpoint to safetensors") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise CheckpointError(f"{file} does not hold names and tensors; convert the checkpoint to safetensors")
    for name, tensor in tensors.items():
        yield name, tensor.detach()  # parameters were saved, where somebody saved the network's own
