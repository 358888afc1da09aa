"""Blocks of several tenants in host memory and on disk, apart from one another, each within quotas of its own."""

from __future__ import annotations

import hmac
import os
import queue
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from quire_interfaces import BlockKey, ConfigError
from quire_kv_transfer.block_files import BlockFiles
from quire_kv_transfer.block_frame import HEADER_BYTES, BlockFormatError, check_frame
from quire_kv_transfer.folder import TierFolder
from quire_kv_transfer.host_memory import HostMemoryTier
from quire_kv_transfer.usage import FolderUsage, open_usage

__all__ = ["BlockStore", "StoreTenant", "TenantBlocks"]

MAX_WAITING_FRAMES = 64
"""Frames that wait for the disk; beyond it they are in memory only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTenant:
    """Somebody whose engines share blocks."""

    name: str
    """Letters, digits, - and _; the name of its folder."""
    api_key: str = ""
    """What its engines say; empty for a store without keys."""
    memory_bytes: int
    """Quota of host memory."""
    disk_bytes: int = 0
    """Quota of disk; 0 keeps nothing there."""


class TenantBlocks:
    """Blocks of one tenant. Thread-safe.

    Args:
        tenant: Its quotas.
        folder: Where its files are; None for no disk.

    Raises:
        ConfigError: the folder cannot be used, or has no room for the quota.
    """

    def __init__(self, tenant: StoreTenant, folder: str | None) -> None:
        self.tenant = tenant
        self.memory = HostMemoryTier(tenant.memory_bytes)
        self._usage: FolderUsage | None = None
        if folder is not None and tenant.disk_bytes:
            self._usage = open_usage(os.path.join(folder, tenant.name), tenant.disk_bytes, 4096)
        self._files: dict[bytes, BlockFiles] = {}
        """By fingerprint."""
        self._to_disk: queue.Queue[tuple[bytes, BlockKey, bytearray] | None] = queue.Queue(MAX_WAITING_FRAMES)
        if self._usage is not None:
            threading.Thread(target=self._write, name="quire-kv-store-disk", daemon=True).start()

    def files(self, fingerprint: bytes) -> BlockFiles | None:
        """Files of one model; None without a disk."""
        if self._usage is None:
            return None
        if fingerprint not in self._files:
            self._files[fingerprint] = BlockFiles(TierFolder(self._usage.root, fingerprint), self._usage)
        return self._files[fingerprint]

    def look_up(self, fingerprint: bytes, keys: Sequence[BlockKey]) -> bytes:
        """One byte per key: 1 where there is a frame."""
        files = self.files(fingerprint)
        return bytes(
            self.memory.has(_of_model(fingerprint, key)) or (files is not None and files.has(key)) for key in keys
        )

    def load(self, fingerprint: bytes, key: BlockKey) -> bytearray | None:
        """A frame, not to be changed; None where there is none."""
        frame = self.memory.frame(_of_model(fingerprint, key))
        files = self.files(fingerprint)
        if frame is None and files is not None:
            frame = self._read(files, key)
            if frame is not None:
                self.memory.keep(_of_model(fingerprint, key), frame)
        return frame

    def _read(self, files: BlockFiles, key: BlockKey) -> bytearray | None:
        try:
            frame = bytearray(os.path.getsize(files.folder.path(key)))
            return frame if files.load(key, [memoryview(frame)]) else None
        except BlockFormatError:
            return None
        except OSError:  # a disk that gives nothing is one that has nothing
            return None

    def store(self, fingerprint: bytes, key: BlockKey, frame: bytearray) -> bool:
        """Take a frame over that is whole and the right one; whether it was."""
        view = memoryview(frame)
        try:
            check_frame(bytes(view[:HEADER_BYTES]), [view[HEADER_BYTES:]], fingerprint, key)
        except BlockFormatError:
            return False
        is_kept = self.memory.keep(_of_model(fingerprint, key), frame)
        if self._usage is None:
            return is_kept
        try:
            self._to_disk.put_nowait((fingerprint, key, frame))
        except queue.Full:
            return is_kept
        return True

    def discard(self, fingerprint: bytes, key: BlockKey) -> None:
        """Drop a frame."""
        self.memory.discard(_of_model(fingerprint, key))
        files = self.files(fingerprint)
        if files is not None:
            files.discard(key)

    def _write(self) -> None:
        while (item := self._to_disk.get()) is not None:
            fingerprint, key, frame = item
            files = self.files(fingerprint)
            assert files is not None
            try:
                files.store(key, [memoryview(frame)])
            except OSError:  # full, or gone: memory has it
                continue

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if self._usage is not None:
            self._to_disk.put(None)


class BlockStore:
    """Blocks of all tenants.

    Args:
        tenants: At least one; several need keys, which differ.
        folder: Where files are; None for no disk.

    Raises:
        ConfigError: tenants that cannot be told apart, or a folder that cannot be used.
    """

    def __init__(self, tenants: Sequence[StoreTenant], folder: str | None = None) -> None:
        for tenant in tenants:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", tenant.name):
                raise ConfigError(f"a tenant's name has letters, digits, - and _ only, got {tenant.name!r}")
        names, keys = {tenant.name for tenant in tenants}, {tenant.api_key for tenant in tenants}
        if not tenants or len(names) < len(tenants) or len(keys) < len(tenants) or (len(tenants) > 1 and "" in keys):
            raise ConfigError("each tenant of a block store needs a name and a key of its own")
        self._tenants = [TenantBlocks(tenant, folder) for tenant in tenants]

    @property
    def has_keys(self) -> bool:
        """Whether engines must say a key."""
        return bool(self._tenants[0].tenant.api_key)

    def tenant_of(self, api_key: bytes) -> TenantBlocks | None:
        """Blocks of the tenant whose key this is; None where it is nobody's."""
        match = None
        for blocks in self._tenants:
            if hmac.compare_digest(blocks.tenant.api_key.encode(), api_key):
                match = blocks
        return match

    def close(self) -> None:
        """Write what waits."""
        for blocks in self._tenants:
            blocks.close()


def _of_model(fingerprint: bytes, key: BlockKey) -> BlockKey:
    """A key in memory, where blocks of all models of a tenant lie together."""
    return BlockKey(key.group, fingerprint + key.block_hash)
