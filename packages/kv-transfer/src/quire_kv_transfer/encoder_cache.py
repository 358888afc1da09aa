"""Encoder outputs in the disk tier: embeddings of images, videos and sounds under the keys of their items, and what
prompts need to know of the items, so that none is prepared or encoded again.

They are blocks of two groups under a fingerprint of their own, that of the towers; the block hash is a hash of the
item's key.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from quire_interfaces import BlockKey
from quire_kv_transfer.block_files import BlockFiles
from quire_kv_transfer.folder import TierFolder, warn_switched_off
from quire_kv_transfer.usage import FolderUsage, open_usage

__all__ = ["DiskEncoderCache"]

_logger = logging.getLogger(__name__)

_EMBEDS, _ITEM = 0, 1
"""Groups of blocks."""
_MAX_WAITING_BYTES = 256 << 20
"""Embeddings that wait to be written; more are not kept."""
_GRACE_S = 2.0
"""How long `close` waits for the writing thread."""


class DiskEncoderCache:
    """Implements `quire_interfaces.EncoderCacheConnector`. Thread-safe. A disk that fails switches it off.

    Args:
        folder: Its fingerprint is of all that embeddings depend on beside their items.
        usage: Bound of the folder.
        dtype: Of the embeddings, a name of torch: "float32", "bfloat16" or "float16".
        width: Numbers of one embedding.
    """

    def __init__(self, folder: TierFolder, usage: FolderUsage, *, dtype: str, width: int) -> None:
        self.dtype = dtype
        self.width = width
        self._usage = usage
        self._files = BlockFiles(folder, usage)
        self._is_stopped = False
        self._lock = threading.Lock()
        self._waiting: dict[BlockKey, memoryview] = {}
        """Embeddings that are to be written."""
        self._queue: queue.Queue[tuple[BlockKey, memoryview] | None] = queue.Queue()
        self._writer: threading.Thread | None = None

    @classmethod
    def open(
        cls, path: str, fingerprint: bytes, *, dtype: str, width: int, size_bytes: int | None = None
    ) -> DiskEncoderCache:
        """A cache in a folder that nothing else in this process uses.

        Args:
            path: The folder; made if it is not there.
            fingerprint: 32 bytes from `model_fingerprint`, of the towers.
            dtype: Of the embeddings.
            width: Numbers of one embedding.
            size_bytes: Bound of all files in the folder; None takes half of what is free there, together with what they
                take now.

        Raises:
            ConfigError: the folder cannot be written to, or is too small.
        """
        usage = open_usage(path, size_bytes, width)
        return cls(TierFolder(usage.root, fingerprint), usage, dtype=dtype, width=width)

    @classmethod
    def at(cls, address: Mapping[str, Any]) -> DiskEncoderCache:
        """The cache of another process on this machine.

        Args:
            address: That cache's `address`.
        """
        usage = FolderUsage(address["root"])
        usage.scan()
        usage.set_bound(address["size_bytes"])
        folder = TierFolder(address["root"], bytes.fromhex(address["fingerprint"]))
        return cls(folder, usage, dtype=address["dtype"], width=address["width"])

    @property
    def address(self) -> dict[str, Any]:
        """Where another process finds the same cache, as plain data."""
        folder = self._files.folder
        return {
            "root": folder.root,
            "fingerprint": folder.fingerprint.hex(),
            "size_bytes": self._usage.bound_bytes,
            "dtype": self.dtype,
            "width": self.width,
        }

    @property
    def is_stopped(self) -> bool:
        """Whether it was switched off by a failure of the disk, or closed."""
        return self._is_stopped

    def load_embeds(self, key: str, num_embeds: int) -> bytearray | None:
        """The embeddings of an item, [num_embeds, width]; None where they are not there."""
        block_key = _block_key(key, _EMBEDS)
        with self._lock:
            waiting = self._waiting.get(block_key)
        if waiting is not None:
            return bytearray(waiting)
        payload = bytearray(num_embeds * self.width * (2 if "16" in self.dtype else 4))
        with self._switched_off_by_errors():
            if not self._is_stopped and self._files.read(block_key, [memoryview(payload)]):
                return payload
        return None

    def save_embeds(self, key: str, embeds: memoryview) -> None:
        """Keep the embeddings of an item; returns at once. Nobody may change them afterwards."""
        block_key = _block_key(key, _EMBEDS)
        with self._lock:
            is_full = sum(map(len, self._waiting.values())) + len(embeds) > _MAX_WAITING_BYTES
            if self._is_stopped or block_key in self._waiting or (self._waiting and is_full):
                return
            self._waiting[block_key] = embeds
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="quire-encoder-cache-writer", daemon=True)
                self._writer.start()
                atexit.register(self.close)  # a process that ends closes nothing, and freezes this thread
        self._queue.put((block_key, embeds))

    def load_item(self, key: str) -> bytes | None:
        """The description of an item; None where there is none."""
        with self._switched_off_by_errors():
            if not self._is_stopped:
                return self._files.read_any(_block_key(key, _ITEM))
        return None

    def save_item(self, key: str, description: bytes) -> None:
        """Keep the description of an item. Written when this returns."""
        with self._switched_off_by_errors():
            if not self._is_stopped:
                self._files.write(_block_key(key, _ITEM), description)

    def flush(self) -> None:
        """Wait until the embeddings that were to be kept are written."""
        self._queue.join()

    def close(self) -> None:
        """Write what was to be kept, within two seconds. Idempotent."""
        with self._lock:
            writer, self._writer, self._is_stopped = self._writer, None, True
        if writer is not None:
            atexit.unregister(self.close)
            self._queue.put(None)
            writer.join(_GRACE_S)
            if writer.is_alive():
                root = self._files.folder.root
                _logger.warning("the disk tier in %s does not answer; embeddings are lost that were not written", root)

    def _write(self) -> None:
        while (block := self._queue.get()) is not None:
            with self._switched_off_by_errors():
                self._files.write(*block)
            with self._lock:
                del self._waiting[block[0]]
            self._queue.task_done()

    @contextlib.contextmanager
    def _switched_off_by_errors(self) -> Iterator[None]:
        """An error of the block, of the disk or of our own, switches the cache off, with one warning."""
        try:
            yield
        except Exception as error:
            with self._lock:
                was_stopped, self._is_stopped = self._is_stopped, True
            if not was_stopped:
                warn_switched_off(self._files.name, error)


def _block_key(key: str, group: int) -> BlockKey:
    return BlockKey(group, hashlib.sha256(key.encode()).digest())
