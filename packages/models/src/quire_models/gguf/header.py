"""What stands before the weights of a GGUF file: metadata, and where each tensor is. Free of torch.

The layout is that of the GGUF specification, versions 2 and 3, little-endian: magic, version, number of tensors, number
of metadata pairs, the pairs, the tensors' names, sizes, types and places, and behind an aligned border their data.
Knows bytes; does not know what keys mean.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_interfaces import CheckpointError, Fields

__all__ = ["BLOCKS", "GgufHeader", "GgufTensor", "first_part", "read_header"]

BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Number of a tensor type -> name, weights of a block, bytes of a block."""

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is."""

    name: str
    shape: tuple[int, ...]
    """Outermost first, as torch has it: a linear layer's weight is [outputs, inputs]."""
    kind: str
    """A name of `BLOCKS`."""
    offset: int
    """Of its first byte in the file."""
    num_bytes: int
    path: Path
    """Of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file, or of all parts of one that was split."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    fields: Fields
    """The metadata, which remembers what of it was read."""


def first_part(path: Path) -> Path:
    """Of a file that was split ("name-00003-of-00005.gguf"), the part that has the metadata; else the file."""
    found = _PART.fullmatch(path.name)
    return path.with_name(f"{found[1]}-00001-of-{found[2]}.gguf") if found else path


def read_header(path: Path) -> GgufHeader:
    """Read everything but the weights; of a file that was split, that of all its parts.

    Args:
        path: The file, or the first of its parts; or a link to one.

    Raises:
        CheckpointError: Not a GGUF file, a version or tensor type that is not read, a file that ends too early, or a
            part that is missing or of another file.
    """
    if path.is_symlink() and not _PART.fullmatch(path.name):
        path = path.parent / path.readlink()  # one step: what is linked may be a link itself, under the part's name
    header = _read_file(path)
    count = header.metadata.get("split.count", 1)
    if count == 1:
        return header
    found = _PART.fullmatch(path.name)
    if found is None or int(found[2]) != count or header.metadata.get("split.no") != 0:
        raise CheckpointError(
            f"{path} is part {header.metadata.get('split.no')} of {count}, counted from 0; give the first part under "
            f"the name that it was published with (NAME-00001-of-{count:05d}.gguf), the others beside it"
        )
    parts = [path.with_name(f"{found[1]}-{i:05d}-of-{found[2]}.gguf") for i in range(2, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {', '.join(missing)}; download all {count} parts of the file")
    for number, part in enumerate(parts, 1):
        other = _read_file(part)
        if (other.metadata.get("split.no"), other.metadata.get("split.count")) != (number, count):
            raise CheckpointError(f"{part} does not say that it is part {number + 1} of {count}; download it again")
        header.tensors.update(other.tensors)
    total = header.metadata.get("split.tensors.count", len(header.tensors))
    if total != len(header.tensors):
        raise CheckpointError(
            f"the parts of {path} have {len(header.tensors)} tensors, should have {total}; use parts of one file"
        )
    return header


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data), path, len(data))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; download the file again") from error


class _Cursor:
    """Reads values one behind the other."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self.at = path, data, 0

    def take(self, num_bytes: int) -> bytes:
        piece = self._data[self.at : self.at + num_bytes]
        if len(piece) != num_bytes:
            raise CheckpointError(f"{self._path} ends within its header, at byte {self.at}; download the file again")
        self.at += num_bytes
        return piece

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize(f"<{letter}")))

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return list(self.numbers(_SCALARS[inner], count)) if inner in _SCALARS else self._values(inner, count)
        raise CheckpointError(
            f"{self._path}: metadata of type {kind} at byte {self.at} is not known; get the file again"
        )

    def _values(self, kind: int, count: int) -> list[Any]:
        return [self.value(kind) for _ in range(count)]


def _parse(cursor: _Cursor, path: Path, size: int) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise CheckpointError(
            f"{path}: GGUF version {version} is not read (2 and 3 are, in little-endian order); convert the model again"
        )
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_pairs)}
    entries = [_entry(cursor, path) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment must be at least 1, is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        tensor = _placed(path, name, shape, kind, start + offset)
        if tensor.offset + tensor.num_bytes > size:
            raise CheckpointError(
                f"{path} ends within the tensor {name!r} (byte {size} of at least {tensor.offset + tensor.num_bytes}); "
                "download the file again"
            )
        tensors[name] = tensor
    return GgufHeader(path, metadata, tensors, Fields(metadata, str(path)))


def _entry(cursor: _Cursor, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.text(), cursor.number("I")
    if num_dims > _MAX_DIMS:
        raise CheckpointError(f"{path}: tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMS} are possible")
    shape = tuple(reversed(cursor.numbers("Q", num_dims)))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in BLOCKS:
        known = ", ".join(known for known, _, _ in BLOCKS.values())
        raise CheckpointError(f"{path}: tensor {name!r} has the type {kind}, which is not read; {known} are")
    text, weights, num_bytes = BLOCKS[kind]
    if shape and shape[-1] % weights:
        raise CheckpointError(
            f"{path}: {shape[-1]} inputs of tensor {name!r} are no whole blocks of {weights} ({text})"
        )
    return GgufTensor(name, shape, text, offset, math.prod(shape) // weights * num_bytes, path)
