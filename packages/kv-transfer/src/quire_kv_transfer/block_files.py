"""Block files of one model in a tier's folder, read and written within the folder's bound.

What is damaged or of another model is removed, with one line in the log, and counts as not there. Knows no queue and no
thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

from quire_interfaces import BlockKey
from quire_kv_transfer.block_file import expect_block, read_frame, write_frame
from quire_kv_transfer.block_frame import HEADER_BYTES, BlockFormatError, check_frame, frame_header
from quire_kv_transfer.folder import TierFolder
from quire_kv_transfer.usage import FolderUsage

__all__ = ["BlockFiles"]

_logger = logging.getLogger(__name__)


class BlockFiles:
    """Reads and writes blocks by their keys; implements `BlockTier`. Thread-safe.

    Args:
        folder: Names of the files.
        usage: Bound of the folder.
    """

    def __init__(self, folder: TierFolder, usage: FolderUsage) -> None:
        self.folder = folder
        self._usage = usage

    @property
    def name(self) -> str:
        """The folder."""
        return f"disk tier {self.folder.root}"

    def has(self, key: BlockKey) -> bool:
        """Whether there is a file for the block."""
        return self.folder.has(key)

    def look_up(self, keys: Sequence[BlockKey]) -> None:
        """Nothing: `has` asks the file system."""

    def expect(self, key: BlockKey) -> None:
        """Tell the system that a block will be read soon. Never raises."""
        expect_block(self.folder.path(key))

    def read(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Read a block into its place, and note that it was used.

        Args:
            key: The block.
            buffers: Writable bytes, together as long as the block; rubbish is left in them where it is not there.

        Returns:
            Whether there was such a block, whole.

        Raises:
            OSError: the disk does not give it.
        """
        header = bytearray(HEADER_BYTES)
        try:
            if not self.load(key, [memoryview(header), *buffers]):
                return False
            check_frame(header, buffers, self.folder.fingerprint, key)
        except BlockFormatError as error:
            _logger.warning("removed %s from the disk tier: %s", self.folder.path(key), error)
            self.discard(key)
            return False
        return True

    def load(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Read a frame into its place, and note that it was used.

        Raises:
            BlockFormatError: the file has another length.
            OSError: the disk does not give it.
        """
        path = self.folder.path(key)
        try:
            read_frame(path, buffers)
        except FileNotFoundError:
            return False
        self._usage.used(path)
        return True

    def discard(self, key: BlockKey) -> None:
        """Remove a file."""
        path = self.folder.path(key)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._usage.removed(path)

    def read_any(self, key: BlockKey) -> bytes | None:
        """The bytes of a block whose length is not known; None where there is none. Raises OSError as `read` does."""
        try:
            num_bytes = os.path.getsize(self.folder.path(key)) - HEADER_BYTES
        except FileNotFoundError:
            return None
        payload = bytearray(max(0, num_bytes))
        return bytes(payload) if self.read(key, [memoryview(payload)]) else None

    def write(self, key: BlockKey, payload: bytes | memoryview) -> None:
        """Write a block that is not there, at the cost of those that were used longest ago.

        Raises:
            OSError: the disk does not take it.
        """
        self.store(key, [frame_header(self.folder.fingerprint, key, [payload]), payload])

    def store(self, key: BlockKey, buffers: Sequence[bytes | memoryview]) -> bool:
        """Write a frame that is not there. Raises OSError as `write` does."""
        if not self.folder.has(key):
            file_bytes = sum(map(len, buffers))
            self._usage.make_room(file_bytes)
            path = self.folder.path(key)
            write_frame(path, buffers)
            self._usage.added(path, file_bytes)
        return True

    def close(self) -> None:
        """Nothing: files need no closing."""
