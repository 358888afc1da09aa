"""One block of one KV cache group as a file: a fixed header, then the raw bytes of the group's layers.

    offset  bytes  field (little endian)
    0       8      magic "QUIREKV" and a zero byte
    8       4      version of this format
    12      4      KV cache group
    16      32     fingerprint: model, dtype, block layout, hash algorithm (`fingerprint`)
    48      4      length of the block hash
    52      32     block hash, zero-padded
    84      8      length of the payload
    92      16     XXH3-128 of the payload
    108     16     zeros
    124     4      CRC-32 of the 124 bytes before

The checksums find accidents (a disk that lost a page, a write that power cut short), not forgery: the folder is as
trusted as the checkpoint. A file is written under a temporary name and renamed, so that a name never stands for half a
block; it is not synced, since whatever a crash leaves is recognized. Knows no queue, no thread and no bound.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import zlib
from collections.abc import Sequence

import xxhash

from quire_interfaces import BlockKey, QuireError

__all__ = ["HEADER_BYTES", "MAX_HASH_BYTES", "BlockFileError", "expect_block", "read_block", "write_block"]

HEADER_BYTES = 128
MAX_HASH_BYTES = 32

_MAGIC = b"QUIREKV\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sII32sI32sQ16s16x")
_CRC = struct.Struct("<I")
_MAX_BUFFERS = 1024
"""Buffers that one system call takes (IOV_MAX on Linux)."""

_temporary_numbers = itertools.count()


class BlockFileError(QuireError):
    """A file is not the block it should be. The message says in which respect."""


def write_block(path: str, fingerprint: bytes, key: BlockKey, payload: bytes | memoryview) -> None:
    """Write a block under its name; folders are made as needed.

    Raises:
        OSError: the disk did not take it; nothing is left of it.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}-{next(_temporary_numbers)}.tmp")
    fd = _create(temporary)
    try:
        try:
            _write_all(fd, [memoryview(_header(fingerprint, key, payload)), memoryview(payload)])
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
        BlockFileError: the file is not this block, or damaged.
        OSError: it cannot be read.
    """
    header = bytearray(HEADER_BYTES)
    payload_bytes = sum(map(len, buffers))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != HEADER_BYTES + payload_bytes:
            raise BlockFileError(f"it has {size} bytes and should have {HEADER_BYTES + payload_bytes}")
        if _read_all(fd, [memoryview(header), *buffers]) != size:
            raise BlockFileError("it became shorter while it was read")
    finally:
        os.close(fd)
    expected = _checked_header(bytes(header), fingerprint, key, payload_bytes)
    if _checksum(buffers) != expected:
        raise BlockFileError("its content does not have the checksum it was written with")


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


def _header(fingerprint: bytes, key: BlockKey, payload: bytes | memoryview) -> bytes:
    assert len(fingerprint) == 32
    assert len(key.block_hash) <= MAX_HASH_BYTES
    checksum = _checksum([memoryview(payload)])
    length = len(key.block_hash)
    fields = _FIELDS.pack(_MAGIC, _VERSION, key.group, fingerprint, length, key.block_hash, len(payload), checksum)
    return fields + _CRC.pack(zlib.crc32(fields))


def _checked_header(header: bytes, fingerprint: bytes, key: BlockKey, payload_bytes: int) -> bytes:
    """The checksum of the payload, when everything else is as it should be."""
    magic, version, group, of_whom, length, padded_hash, num_bytes, checksum = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        raise BlockFileError("it is not a KV block file")
    if version != _VERSION:
        raise BlockFileError(f"it has version {version} of the format, this is version {_VERSION}")
    if _CRC.unpack_from(header, _FIELDS.size)[0] != zlib.crc32(header[: _FIELDS.size]):
        raise BlockFileError("its header is damaged")
    if of_whom != fingerprint:
        raise BlockFileError("it was written by another model, dtype or layout")
    if (group, padded_hash[:length]) != key:
        raise BlockFileError("it holds another block than its name says")
    if num_bytes != payload_bytes:
        raise BlockFileError(f"it holds {num_bytes} bytes and should hold {payload_bytes}")
    return bytes(checksum)


def _checksum(buffers: Sequence[memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


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
