"""Frames of blocks as files.

A file is written under a temporary name and renamed, so that a name never stands for half a block; it is not synced,
since whatever a crash leaves is recognized. Knows no queue, no thread and no bound.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence

from quire_interfaces import BlockKey
from quire_kv_transfer.block_frame import HEADER_BYTES, BlockFormatError, check_frame, frame_header

__all__ = ["expect_block", "read_block", "read_frame", "write_block", "write_frame"]

_MAX_BUFFERS = 1024
"""Buffers that one system call takes (IOV_MAX on Linux)."""

_temporary_numbers = itertools.count()


def write_block(path: str, fingerprint: bytes, key: BlockKey, payload: bytes | memoryview) -> None:
    """Write a block under its name. Raises OSError as `write_frame` does."""
    write_frame(path, [frame_header(fingerprint, key, [payload]), payload])


def write_frame(path: str, buffers: Sequence[bytes | memoryview]) -> None:
    """Write a frame, given in pieces, under its name; folders are made as needed.

    Raises:
        OSError: the disk did not take it; nothing is left of it.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}-{next(_temporary_numbers)}.tmp")
    fd = _create(temporary)
    try:
        try:
            _write_all(fd, [memoryview(buffer) for buffer in buffers])
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_block(path: str, fingerprint: bytes, key: BlockKey, buffers: Sequence[memoryview]) -> None:
    """Read a block into its place.

    Args:
        path: The file.
        fingerprint: What it must have been written with.
        key: Which block it must be.
        buffers: Writable bytes, together as long as the payload. Rubbish is left in them when this raises.

    Raises:
        FileNotFoundError: there is no such file.
        BlockFormatError: the file is not this block, or damaged.
        OSError: it cannot be read.
    """
    header = bytearray(HEADER_BYTES)
    read_frame(path, [memoryview(header), *buffers])
    check_frame(header, buffers, fingerprint, key)


def read_frame(path: str, buffers: Sequence[memoryview]) -> None:
    """Read a frame into buffers that are as long as it, together.

    Raises:
        FileNotFoundError: there is no such file.
        BlockFormatError: the file has another length.
        OSError: it cannot be read.
    """
    num_bytes = sum(map(len, buffers))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != num_bytes:
            raise BlockFormatError(f"it has {size} bytes and should have {num_bytes}")
        if _read_all(fd, list(buffers)) != size:
            raise BlockFormatError("it became shorter while it was read")
    finally:
        os.close(fd)


def expect_block(path: str) -> None:
    """Tell the system that a file will be read soon, so that the disk works while others are copied. Never raises."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def _write_all(fd: int, buffers: list[memoryview]) -> None:
    while buffers:
        buffers = _after(buffers, os.writev(fd, buffers[:_MAX_BUFFERS]))


def _read_all(fd: int, buffers: list[memoryview]) -> int:
    num_read = 0
    while buffers:
        count = os.readv(fd, buffers[:_MAX_BUFFERS])
        if count == 0:
            break
        num_read += count
        buffers = _after(buffers, count)
    return num_read


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the buffers after their first bytes."""
    index = 0
    while index < len(buffers) and num_bytes >= len(buffers[index]):
        num_bytes -= len(buffers[index])
        index += 1
    rest = buffers[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
