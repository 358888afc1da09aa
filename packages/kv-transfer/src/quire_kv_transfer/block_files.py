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
from quire_kv_transfer.block_file import HEADER_BYTES, BlockFileError, expect_block, read_block, write_block
from quire_kv_transfer.folder import TierFolder
from quire_kv_transfer.usage import FolderUsage

__all__ = ["BlockFiles"]

_logger = logging.getLogger(__name__)


class BlockFiles:
    """Reads and writes blocks by their keys. Thread-safe.

    Args:
        folder: Names of the files.
        usage: Bound of the folder.
    """

    def __init__(self, folder: TierFolder, usage: FolderUsage) -> None:
        self.folder = folder
        self._usage = usage

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
        path = self.folder.path(key)
        try:
            read_block(path, self.folder.fingerprint, key, buffers)
        except FileNotFoundError:
            return False
        except BlockFileError as error:
            _logger.warning("removed %s from the disk tier: %s", path, error)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._usage.removed(path)
            return False
        self._usage.used(path)
        return True

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
        if self.folder.has(key):
            return
        file_bytes = HEADER_BYTES + len(payload)
        self._usage.make_room(file_bytes)
        path = self.folder.path(key)
        write_block(path, self.folder.fingerprint, key, payload)
        self._usage.added(path, file_bytes)
