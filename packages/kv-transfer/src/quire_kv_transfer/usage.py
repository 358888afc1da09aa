"""How much the block files of a folder take, and which of them go first: the least recently used.

The time of last use is the file's modification time, so it survives restarts and is seen by other engines. Files that
are not block files are neither counted nor touched. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from quire_interfaces import ConfigError
from quire_kv_transfer.block_frame import HEADER_BYTES
from quire_kv_transfer.folder import prepare_folder

__all__ = ["FolderUsage", "disk_bytes", "open_usage"]

_MODEL = re.compile(r"[0-9a-f]{16}")
_SHELF = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{2,64}-[0-9]+\.kv")
_PAGE_BYTES = 4096
_ABANDONED_AFTER_S = 600.0
"""A temporary file this old belongs to an engine that was killed."""
_RESCAN_SHARE = 16
"""After writing this part of the bound, look again what other engines have written."""


def disk_bytes(file_bytes: int) -> int:
    """What a file takes on disk, in whole pages."""
    return -(-file_bytes // _PAGE_BYTES) * _PAGE_BYTES


class _File(NamedTuple):
    num_bytes: int
    used_ns: int


class FolderUsage:
    """Keeps a folder's block files, of all models, within a bound.

    With several engines on one folder each keeps the bound as far as it knows; between two looks at the folder they may
    exceed it by a sixteenth per engine.

    Args:
        root: The folder.
        bound_bytes: Most bytes that the files may take; None sets no bound yet.
    """

    def __init__(self, root: str, bound_bytes: int | None = None) -> None:
        self._root = root
        self._bound_bytes = sys.maxsize if bound_bytes is None else bound_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()
        """Path -> what is known of it, least recently used first."""
        self._total_bytes = 0
        self._written_bytes = 0

    @property
    def total_bytes(self) -> int:
        """What the files take, as far as is known."""
        return self._total_bytes

    @property
    def root(self) -> str:
        """The folder."""
        return self._root

    @property
    def bound_bytes(self) -> int:
        """Most bytes that the files may take."""
        return self._bound_bytes

    def set_bound(self, bound_bytes: int) -> None:
        """Bound the files from now on; those that are too many go."""
        self._bound_bytes = bound_bytes
        self.make_room(0)

    def scan(self) -> None:
        """Look at the folder; also remove what killed engines left half written."""
        entries = sorted(self._walk(), key=lambda entry: entry[1].used_ns)
        with self._lock:
            self._files = OrderedDict(entries)
            self._total_bytes = sum(file.num_bytes for file in self._files.values())
            self._written_bytes = 0

    def _walk(self) -> Iterator[tuple[str, _File]]:
        abandoned_ns = time.time_ns() - int(_ABANDONED_AFTER_S * 1e9)
        for model in _folders(self._root, _MODEL):
            for shelf in _folders(model, _SHELF):
                for entry in _entries(shelf):
                    with contextlib.suppress(OSError):  # another engine removed it meanwhile
                        stat = entry.stat(follow_symlinks=False)
                        if _BLOCK.fullmatch(entry.name):
                            yield entry.path, _File(disk_bytes(stat.st_size), stat.st_mtime_ns)
                        elif entry.name.endswith(".tmp") and stat.st_mtime_ns < abandoned_ns:
                            os.unlink(entry.path)

    def used(self, path: str) -> None:
        """A file was read: it goes last from now on."""
        with contextlib.suppress(OSError):  # gone since
            os.utime(path)
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None:
                self._files[path] = file._replace(used_ns=time.time_ns())

    def added(self, path: str, file_bytes: int) -> None:
        """A file was written."""
        num_bytes = disk_bytes(file_bytes)
        with self._lock:
            self._drop(path)
            self._files[path] = _File(num_bytes, time.time_ns())
            self._total_bytes += num_bytes
            self._written_bytes += num_bytes

    def removed(self, path: str) -> None:
        """A file is gone."""
        with self._lock:
            self._drop(path)

    def make_room(self, file_bytes: int) -> None:
        """Remove files until another of this size fits within the bound."""
        if self._written_bytes * _RESCAN_SHARE > self._bound_bytes:
            self.scan()
        target_bytes = self._bound_bytes - disk_bytes(file_bytes)
        with self._lock:
            while self._total_bytes > target_bytes and self._files:
                self._evict_first()

    def _evict_first(self) -> None:
        path, file = next(iter(self._files.items()))
        try:
            used_ns = os.stat(path).st_mtime_ns
            if used_ns > file.used_ns:  # another engine has used it since
                self._files[path] = file._replace(used_ns=used_ns)
                self._files.move_to_end(path)
                return
            os.unlink(path)
        except OSError:
            pass  # gone already, or not ours to remove: it no longer counts either way
        self._drop(path)

    def _drop(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            self._total_bytes -= file.num_bytes


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _folders(folder: str, name: re.Pattern[str]) -> list[str]:
    return [
        entry.path for entry in _entries(folder) if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def open_usage(path: str, max_bytes: int | None, largest_block_bytes: int) -> FolderUsage:
    """The use of a tier's folder, counted and bounded.

    Args:
        path: The folder; made if it is not there.
        max_bytes: Bound of all files in it; None takes half of what is free there, together with what they take now.
        largest_block_bytes: Of the blocks to be kept; one of them has to fit.

    Raises:
        ConfigError: the folder cannot be written to, or is too small.
    """
    usage = FolderUsage(prepare_folder(path))
    usage.scan()
    usage.set_bound(_bound(path, usage.root, max_bytes, usage.total_bytes, largest_block_bytes))
    return usage


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
