"""A block file gives back exactly what was written, or says what is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire_interfaces import BlockKey
from quire_kv_transfer import BlockFormatError, read_block, write_block
from quire_kv_transfer.block_file import HEADER_BYTES

FINGERPRINT = bytes(range(32))
KEY = BlockKey(1, b"\0" * 5 + b"hash of a block" + b"\0" * 12)
PAYLOAD = bytes(i * 7 % 251 for i in range(900))


def read(path: Path, fingerprint: bytes = FINGERPRINT, key: BlockKey = KEY, num_bytes: int = len(PAYLOAD)) -> bytes:
    data = bytearray(num_bytes)
    read_block(str(path), fingerprint, key, [memoryview(data)])
    return bytes(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ab" / "block.kv"
    write_block(str(path), FINGERPRINT, KEY, PAYLOAD)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(pieces=st.lists(st.binary(max_size=300), max_size=20), block_hash=st.binary(min_size=16, max_size=32))
def test_what_was_written_comes_back_in_the_same_pieces(tmp_path: Path, pieces: list[bytes], block_hash: bytes) -> None:
    key = BlockKey(3, block_hash)
    path = str(tmp_path / "x.kv")
    write_block(path, FINGERPRINT, key, b"".join(pieces))
    buffers = [bytearray(len(piece)) for piece in pieces]
    read_block(path, FINGERPRINT, key, [memoryview(buffer) for buffer in buffers])
    assert [bytes(buffer) for buffer in buffers] == pieces


def test_more_pieces_than_one_system_call_takes(tmp_path: Path) -> None:
    path = str(tmp_path / "x.kv")
    payload = os.urandom(3000)
    write_block(path, FINGERPRINT, KEY, payload)
    data = bytearray(3000)
    read_block(path, FINGERPRINT, KEY, [memoryview(data)[i : i + 1] for i in range(3000)])
    assert data == payload


def test_only_the_owner_may_read(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_any_changed_byte_is_noticed(path: Path) -> None:
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        with pytest.raises(BlockFormatError):
            read(path)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 500, HEADER_BYTES + len(PAYLOAD) - 1])
def test_a_file_cut_short_is_noticed(path: Path, length: int) -> None:
    os.truncate(path, length)
    with pytest.raises(BlockFormatError, match=f"it has {length} bytes"):
        read(path)


def test_a_longer_file_is_noticed(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(BlockFormatError, match="should have"):
        read(path)


def test_another_model_or_block(path: Path) -> None:
    assert read(path) == PAYLOAD
    with pytest.raises(BlockFormatError, match="another model"):
        read(path, fingerprint=bytes(32))
    for key in (BlockKey(0, KEY.block_hash), BlockKey(1, KEY.block_hash[:-1] + b"x"), BlockKey(1, KEY.block_hash[:-1])):
        with pytest.raises(BlockFormatError, match="another block"):
            read(path, key=key)
    with pytest.raises(BlockFormatError, match="should have"):
        read(path, num_bytes=len(PAYLOAD) + 1)


def test_any_file_of_the_right_length(path: Path) -> None:
    path.write_bytes(os.urandom(HEADER_BYTES + len(PAYLOAD)))
    with pytest.raises(BlockFormatError, match="not a KV block"):
        read(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.kv")


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    """The system's own limit on file sizes stands for a disk that fills up while a block is written."""
    code = f"""
import os, resource, signal
from quire_interfaces import BlockKey
from quire_kv_transfer import write_block
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
write_block({str(tmp_path / "small.kv")!r}, bytes(32), BlockKey(0, bytes(32)), bytes(1000))
try:
    write_block({str(tmp_path / "big.kv")!r}, bytes(32), BlockKey(0, bytes(32)), bytes(100_000))
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "File too large\n", done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.kv"]
