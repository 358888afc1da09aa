"""A block of a KV cache group as bytes that say what they are: a fixed header, then the bytes of the group's layers.

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

Frames are made and checked where blocks leave and enter the KV cache, so that no tier between needs to be trusted to
keep them apart or whole. The checksums find accidents (a page or a packet that was lost), not forgery.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import xxhash

from quire_interfaces import BlockKey, QuireError

__all__ = ["HEADER_BYTES", "MAX_HASH_BYTES", "BlockFormatError", "check_frame", "frame_header"]

HEADER_BYTES = 128
MAX_HASH_BYTES = 32

_MAGIC = b"QUIREKV\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sII32sI32sQ16s16x")
_CRC = struct.Struct("<I")


class BlockFormatError(QuireError):
    """Bytes are not the block they should be. The message says in which respect."""


def frame_header(fingerprint: bytes, key: BlockKey, payload: Sequence[bytes | memoryview]) -> bytes:
    """Header of a block.

    Args:
        fingerprint: 32 bytes that tell this model's blocks from all others.
        key: Which block it is; its hash has at most 32 bytes.
        payload: Bytes of the block, in pieces.
    """
    assert len(fingerprint) == 32
    assert len(key.block_hash) <= MAX_HASH_BYTES
    length, num_bytes = len(key.block_hash), sum(map(len, payload))
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, key.group, fingerprint, length, key.block_hash, num_bytes, _checksum(payload)
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def check_frame(
    header: bytes | bytearray, payload: Sequence[bytes | memoryview], fingerprint: bytes, key: BlockKey
) -> None:
    """Check that a header and a payload are a block.

    Raises:
        BlockFormatError: they are another block, or damaged.
    """
    magic, version, group, of_whom, length, padded_hash, num_bytes, checksum = _FIELDS.unpack_from(header)
    payload_bytes = sum(map(len, payload))
    if magic != _MAGIC:
        raise BlockFormatError("it is not a KV block")
    if version != _VERSION:
        raise BlockFormatError(f"it has version {version} of the format, this is version {_VERSION}")
    if _CRC.unpack_from(header, _FIELDS.size)[0] != zlib.crc32(header[: _FIELDS.size]):
        raise BlockFormatError("its header is damaged")
    if of_whom != fingerprint:
        raise BlockFormatError("it was written by another model, dtype or layout")
    if (group, padded_hash[:length]) != key:
        raise BlockFormatError("it holds another block than its name says")
    if num_bytes != payload_bytes:
        raise BlockFormatError(f"it holds {num_bytes} bytes and should hold {payload_bytes}")
    if _checksum(payload) != checksum:
        raise BlockFormatError("its content does not have the checksum it was written with")


def _checksum(buffers: Sequence[bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()
