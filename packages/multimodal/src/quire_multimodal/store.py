"""Prepared media in shared memory: one folder of files, one owner, everybody else maps them read-only.

A file holds the arrays of one item and is named by the item's key. Its owner counts who needs it; what nobody needs
stays until its bytes are wanted, the least recently used going first. The folder goes when its owner ends. Folders of
owners that were killed go when another owner starts or ends: an owner holds a lock on its folder, and the dead hold
none.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import shutil
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import FeatureArray, MediaItem, OverloadedError

__all__ = ["MediaStore", "StoredItem", "read_features", "write_features"]

_log = logging.getLogger(__name__)
_PREFIX = "quire-media-"
_ALIGNMENT = 64
_MIN_BYTES = 1 << 30
"""What items that are in use may take in any case."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item in the store, and what the prompt needs to know of it."""

    item: MediaItem
    text: str
    """Replaces the item's placeholder in the prompt."""
    embed_token_ids: tuple[int, ...]
    """Tokens of `text` that take embeddings, each kind once."""
    facts: Mapping[str, Any]
    """Small feature arrays as nested lists, by name: grids of patches and lengths, from which positions are counted."""
    num_bytes: int
    """Of the file."""


def write_features(path: Path, features: Mapping[str, NDArray[Any]]) -> tuple[list[FeatureArray], int]:
    """Write the arrays of an item into a file, whole or not at all.

    Returns:
        Where each array lies, and the bytes of the file.
    """
    layout, offset = [], 0
    for name, array in features.items():
        layout.append(FeatureArray(name, str(array.dtype), array.shape, offset))
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    partial = _partial(path)
    with partial.open("wb") as file:
        for place, array in zip(layout, features.values(), strict=True):
            file.seek(place.offset)
            file.write(np.ascontiguousarray(array).data)
        file.truncate(max(offset, 1))
    partial.rename(path)
    return layout, max(offset, 1)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def read_features(item: MediaItem) -> dict[str, NDArray[Any]]:
    """The arrays of an item, mapped from its file: read-only, shared, valid when the file is unlinked later.

    Raises:
        FileNotFoundError: the store has let the item go.
    """
    with open(item.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    arrays = {}
    for name, dtype, shape, offset in item.features:
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(mapped, kind, count, offset).reshape(shape)
    return arrays


class MediaStore:
    """The files of one owner, least recently used first. Not thread-safe.

    Args:
        cache_bytes: What items that nobody uses may take; more make room at once.
        base: Folder in which the store makes its own; shared memory, or the temporary folder where there is too little.
    """

    def __init__(self, cache_bytes: int, base: Path | None = None) -> None:
        self.cache_bytes = cache_bytes
        self.max_bytes = max(cache_bytes, _MIN_BYTES)
        base = base or _roomy_folder(self.max_bytes)
        with _locked(base):  # nobody sweeps between making the folder and locking it
            _sweep(base)
            self.folder = base / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            self.folder.mkdir(mode=0o700)
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._items: OrderedDict[str, StoredItem] = OrderedDict()
        self._num_users: Counter[str] = Counter()
        self.num_bytes = 0
        """Bytes of all files."""

    def __len__(self) -> int:
        return len(self._items)

    def path(self, key: str) -> Path:
        """File of the item with this key, whether it is there or not."""
        return self.folder / key

    def acquire(self, key: str) -> StoredItem | None:
        """The item, kept until it is released; None if it is not there."""
        stored = self._items.get(key)
        if stored is not None:
            self._items.move_to_end(key)
            self._num_users[key] += 1
        return stored

    def add(self, stored: StoredItem) -> None:
        """Take in an item whose file is written, with one user.

        Raises:
            OverloadedError: the items in use leave no room for it; its file is removed.
        """
        self._make_room(self.max_bytes - stored.num_bytes)
        if self.num_bytes + stored.num_bytes > self.max_bytes:
            self.discard(stored.item.key)
            raise OverloadedError("the shared memory for media is full of items in use; try again later")
        self._items[stored.item.key] = stored
        self._num_users[stored.item.key] = 1
        self.num_bytes += stored.num_bytes

    def discard(self, key: str) -> None:
        """Remove what a failed preparation may have left."""
        for path in (self.path(key), _partial(self.path(key))):
            path.unlink(missing_ok=True)

    def release(self, key: str) -> None:
        """One user fewer; an item without any stays as long as there is room."""
        assert self._num_users[key] > 0, "released more often than acquired"
        self._num_users[key] -= 1
        self._make_room(self.cache_bytes)

    def clear(self) -> None:
        """Let go of every item that nobody uses."""
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        """Unlink unused files, oldest first, until all take at most `num_bytes` or none is left."""
        if self.num_bytes <= num_bytes:
            return
        for key in [key for key in self._items if not self._num_users[key]]:
            if self.num_bytes <= num_bytes:
                return
            self.num_bytes -= self._items.pop(key).num_bytes
            del self._num_users[key]
            self.path(key).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, and nothing else: for an end of this process that waits for nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder. Whoever has mapped a file keeps what is mapped."""
        if self._lock >= 0:
            self.remove()
            os.close(self._lock)
            self._lock = -1
            with _locked(
                self.folder.parent
            ):  # of one that was killed, whose processes still lived when this one started
                _sweep(self.folder.parent)
        self._items.clear()
        self.num_bytes = 0

    def check_integrity(self) -> None:
        """Check that files, items and the count of bytes agree; raises AssertionError where they do not."""
        assert self.num_bytes == sum(stored.num_bytes for stored in self._items.values())
        files = {path.name for path in self.folder.iterdir() if path.suffix != ".partial"}
        assert files == set(self._items) == set(self._num_users), "files and items differ"


def _roomy_folder(num_bytes: int) -> Path:
    """Shared memory if there is as much as that, else the folder for temporary files."""
    shared, temporary = Path("/dev/shm"), Path(tempfile.gettempdir())
    if not os.access(shared, os.W_OK):
        _log.warning("there is no shared memory (%s): prepared media are written to %s", shared, temporary)
        return temporary
    free = shutil.disk_usage(shared).free
    if free < num_bytes:
        _log.warning(
            "%s has %d MiB free, less than the %d MiB for prepared media: they are written to %s. Give the container "
            "more shared memory, or lower mm_processor_cache_gb", shared, free >> 20, num_bytes >> 20, temporary,
        )  # fmt: skip
        return temporary
    return shared


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(base: Path) -> None:
    """Remove the folders of owners that are dead."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # of another user, or gone
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its owner lives
        finally:
            os.close(descriptor)
