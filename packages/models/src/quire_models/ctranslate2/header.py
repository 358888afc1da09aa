"""Where the tensors of a `model.bin` lie. Free of torch.

The file: version, name of the kind of network, revision, number of tensors; then of each its name, shape, dtype, number
of bytes, and the bytes; then names that stand for others. Numbers are little-endian, a name is its length (with a zero
byte behind it), then the bytes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from quire_interfaces import CheckpointError

__all__ = ["BIN_NAME", "BinHeader", "BinTensor", "is_ctranslate2", "read_header"]

BIN_NAME = "model.bin"
_DTYPES = {0: ("float32", 4), 1: ("int8", 1), 2: ("int16", 2), 3: ("int32", 4), 4: ("float16", 2), 5: ("bfloat16", 2)}
_NEWEST_VERSION = 6
_MAX_NAME = 1024


class BinTensor(NamedTuple):
    """A tensor in the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    """First byte in the file."""

    @property
    def numel(self) -> int:
        """Numbers that it has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BinHeader:
    """What a file has."""

    kind: str
    """Name of the kind of network, as `WhisperSpec`."""
    tensors: dict[str, BinTensor]
    """By the names of the format, as `decoder/layer_0/ffn/linear_0/weight`."""


def is_ctranslate2(folder: Path) -> bool:
    """Whether the weights of a folder are a `model.bin` of this format."""
    file = folder / BIN_NAME
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        begin = stream.read(6)
    return len(begin) == 6 and 2 <= struct.unpack("<IH", begin)[0] <= _NEWEST_VERSION


def read_header(file: Path) -> BinHeader:
    """What `file` has.

    Raises:
        CheckpointError: it is not of this format, or cut off.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} cannot be read as weights of CTranslate2 ({error}); download the file again"
        ) from error


class _Reader:
    """Reads one file from its beginning. Raises ValueError and struct.error where it is not as it should be."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place = data, 0

    def header(self) -> BinHeader:
        version = self._number("I")
        if not 2 <= version <= _NEWEST_VERSION:
            raise ValueError(f"version {version} of the format is not known")
        kind, _revision, count = self._text(), self._number("I"), self._number("I")
        return BinHeader(kind, dict(self._tensor() for _ in range(count)))

    def _tensor(self) -> tuple[str, BinTensor]:
        name, rank = self._text(), self._number("B")
        shape = tuple(self._number("I") for _ in range(rank))
        dtype, num_bytes = self._number("B"), self._number("I")
        kind, item_bytes = _DTYPES.get(dtype, ("", 0))
        if not kind or prod(shape) * item_bytes != num_bytes:
            raise ValueError(f"{name} has {num_bytes} bytes of dtype {dtype} for the shape {list(shape)}")
        tensor = BinTensor(shape, kind, self._place)
        self._place += num_bytes
        if self._place > len(self._data):
            raise ValueError(f"the file ends within {name}")
        return name, tensor

    def _text(self) -> str:
        length = self._number("H")
        if not 0 < length <= _MAX_NAME:
            raise ValueError(f"a name has {length} bytes")
        begin = self._place
        self._place += length
        return self._data[begin : self._place - 1].decode()

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._place)
        self._place += struct.calcsize(f"<{code}")
        return int(value)
