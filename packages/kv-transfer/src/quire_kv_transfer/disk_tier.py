"""The disk tier as a whole: opened once per engine, gives the scheduler and the runner their halves."""

from __future__ import annotations

import os
from collections.abc import Sequence

from quire_interfaces import BlockMemory, ConfigError, KVCachePlan
from quire_kv_transfer.block_file import HEADER_BYTES
from quire_kv_transfer.disk_connector import DiskConnector
from quire_kv_transfer.disk_worker import DiskWorker
from quire_kv_transfer.encoder_cache import DiskEncoderCache
from quire_kv_transfer.folder import TierFolder, prepare_folder
from quire_kv_transfer.usage import FolderUsage, disk_bytes

__all__ = ["MAX_STORE_BYTES", "DiskTier", "group_block_bytes"]

MAX_STORE_BYTES = 256 << 20
"""Copies that wait to be written: what a disk writes in a fraction of a second, and what a long prefill leaves."""


def group_block_bytes(plan: KVCachePlan) -> tuple[int, ...]:
    """Bytes of one block of each group: all of its layers."""
    return tuple(group.spec.block_bytes * len(group.layer_names) for group in plan.groups)


class DiskTier:
    """A folder that keeps prefix blocks.

    Args:
        path: The folder; made if it is not there.
        fingerprint: 32 bytes from `model_fingerprint`.
        block_bytes: Bytes of a block, per KV cache group.
        size_bytes: Bound of all files in it; None takes half of what is free there, together with what they take now.
        max_wanted: Most blocks remembered as still to be stored; the blocks of the KV cache are a good bound.

    Raises:
        ConfigError: the folder cannot be written to, or is too small.
    """

    def __init__(
        self,
        path: str,
        fingerprint: bytes,
        block_bytes: Sequence[int],
        *,
        size_bytes: int | None = None,
        max_wanted: int = 100_000,
    ) -> None:
        root = prepare_folder(path)
        self._folder = TierFolder(root, fingerprint)
        self._usage = FolderUsage(root)
        self._usage.scan()
        self.size_bytes = _bound(path, root, size_bytes, self._usage.total_bytes, max(block_bytes))
        """Bound of all files in the folder."""
        self._usage.set_bound(self.size_bytes)
        self.connector = DiskConnector(
            self._folder, block_bytes, max_store_bytes=MAX_STORE_BYTES, max_wanted=max_wanted
        )
        """The scheduler's half."""

    @property
    def root(self) -> str:
        """The folder, as an absolute path."""
        return self._folder.root

    @property
    def used_bytes(self) -> int:
        """What the files take now, as far as is known."""
        return self._usage.total_bytes

    def make_worker(self, memory: BlockMemory) -> DiskWorker:
        """The runner's half. It has threads: close it."""
        return DiskWorker(self._folder, self._usage, memory)

    def make_encoder_cache(self, fingerprint: bytes, *, dtype: str, width: int) -> DiskEncoderCache:
        """The files of encoder outputs, within the same bound. It may have a thread: close it.

        Args:
            fingerprint: 32 bytes from `model_fingerprint`, of the towers.
            dtype: Of the embeddings.
            width: Numbers of one embedding.
        """
        return DiskEncoderCache(TierFolder(self.root, fingerprint), self._usage, dtype=dtype, width=width)


def _bound(path: str, root: str, max_bytes: int | None, used_bytes: int, largest_block_bytes: int) -> int:
    stat = os.statvfs(root)
    room_bytes = stat.f_bavail * stat.f_frsize + used_bytes
    bound = room_bytes // 2 if max_bytes is None else max_bytes
    least = disk_bytes(HEADER_BYTES + largest_block_bytes)
    if bound < least:
        what = (
            f"kv_disk_size is {bound}"
            if max_bytes is not None
            else f"kv_disk_path {path!r} has {room_bytes} bytes free"
        )
        raise ConfigError(
            f"{what}, but one block of this model takes {least} bytes; give the tier more room, or switch it off",
            field="kv_disk_size",
        )
    if bound > room_bytes:
        raise ConfigError(
            f"kv_disk_size is {bound}, but kv_disk_path {path!r} has room for {room_bytes} bytes (free space, and what "
            f"the tier's files take already); lower kv_disk_size, or choose a larger disk",
            field="kv_disk_size",
        )
    return bound
