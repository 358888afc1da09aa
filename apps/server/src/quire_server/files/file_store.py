"""Where files are kept: their descriptions in SQLite, their contents beside it, each under the id of its file.

A content that no row names, and that nobody who is alive writes (a lock tells), is what a killed server left: it is
removed. No name that a client chose is part of a path. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError, RequestError
from quire_server.sqlite_file import SQLiteFile

__all__ = [
    "UNFINISHED", "FileInUseError", "FileStore", "FileUpload", "StoredFile", "insert_file", "new_file_id",
    "open_database", "uploading",
]  # fmt: skip

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that still reads its input."""
MAX_FILES = 100_000
"""Of one owner: each costs a row of a kilobyte."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, "
    "owner TEXT NOT NULL, purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, "
    "expires_s INTEGER, padding BLOB NOT NULL, filename TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, place)",
    "CREATE INDEX IF NOT EXISTS files_by_expiry ON files (expires_s)",
    "CREATE TABLE IF NOT EXISTS batches (place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, "
    "owner TEXT NOT NULL, status TEXT NOT NULL, input_file TEXT NOT NULL, output_file TEXT NOT NULL, "
    "error_file TEXT NOT NULL, padding BLOB NOT NULL, object BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, place)",
    "CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status)",
    "CREATE INDEX IF NOT EXISTS batches_by_input ON batches (input_file)",
)
_FIELDS = "id, owner, purpose, num_bytes, created_s, expires_s, filename"
_MINE = "owner = ? AND (expires_s IS NULL OR expires_s > ?)"
_USED = f"id IN (SELECT input_file FROM batches WHERE status IN ({', '.join(repr(status) for status in UNFINISHED)}))"


def open_database(folder: Path) -> SQLiteFile:
    """The rows of files and of batches, which several servers may share.

    Raises:
        ConfigError: the folder cannot be used.
    """
    return SQLiteFile(
        folder / "files.sqlite",
        _TABLES,
        lambda db, padding_bytes: False,
        keeps="files",
        field="files_dir",
        remedy="name another folder with --files-dir",
    )


class FileInUseError(RequestError):
    """A file that a batch still reads cannot be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file."""

    id: str
    owner: str
    """Whose it is (`quire_server.callers.Caller.owner`); "" on a server without keys."""
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None
    """When it is forgotten; None for never."""
    filename: str
    """As its owner calls it; names nothing here."""

    def object(self) -> dict[str, Any]:
        """As clients get it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def new_file_id() -> str:
    """An id that nobody guesses."""
    return f"file-{secrets.token_hex(16)}"


class FileStore:
    """All files of a server. Methods may block and are called from several threads.

    Args:
        folder: Of the contents; made when it is missing, for its owner only.
        database: See `open_database`.
        max_total_bytes: Of all files together.
        max_owner_bytes: Of one owner's files together.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, folder: Path, database: SQLiteFile, *, max_total_bytes: int, max_owner_bytes: int) -> None:
        self._folder = folder / "contents"
        self._database = database
        self._max_total_bytes, self._max_owner_bytes = max_total_bytes, max_owner_bytes
        self._arriving: dict[FileUpload, int] = {}
        """Upload -> bytes that are there already."""
        self._lock = threading.Lock()
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot keep files in {str(folder)!r}: {error.strerror}", field="files_dir") from None
        self.sweep()

    def path_of(self, file_id: str) -> Path:
        """Where the content of a file is, or will be. Only for ids that were made here."""
        return self._folder / file_id

    def begin(self, owner: str) -> FileUpload:
        """A new file that is written piece by piece."""
        return FileUpload(self, owner)

    def get(self, file_id: str, *, owner: str) -> StoredFile | None:
        """The file, None when it is unknown, forgotten, or another's."""
        query = f"SELECT {_FIELDS} FROM files WHERE id = ? AND {_MINE}"
        rows = self._database.rows(query, (file_id, owner, time.time()))
        return _stored(rows[0]) if rows else None

    def listed(
        self, *, owner: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile] | None:
        """At most `limit` files of an owner; None where `after` is none of them."""
        condition, values = _MINE, [owner, time.time()]
        if purpose is not None:
            condition, values = f"{condition} AND purpose = ?", [*values, purpose]
        if after is not None:
            found = self._database.rows(
                f"SELECT place FROM files WHERE id = ? AND {_MINE}", (after, owner, time.time())
            )
            if not found:
                return None
            condition, values = f"{condition} AND place {'<' if newest_first else '>'} ?", [*values, found[0][0]]
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT {_FIELDS} FROM files WHERE {condition} ORDER BY place {order} LIMIT ?"
        return [_stored(row) for row in self._database.rows(query, (*values, limit))]

    def delete(self, file_id: str, *, owner: str) -> bool:
        """Remove a file; whether it was there for this owner.

        Raises:
            FileInUseError: a batch that is not done reads it.
        """
        values = (file_id, owner, time.time())
        with self._database.writing() as db:
            if db.execute(f"SELECT 1 FROM files WHERE id = ? AND {_MINE} AND {_USED}", values).fetchall():
                raise FileInUseError(
                    f"the file {file_id!r} is the input of a batch that is not done: cancel the batch first",
                    param="file_id",
                    code="file_in_use",
                )
            is_gone = self._database.erase(f"DELETE FROM files WHERE id = ? AND {_MINE}", values) > 0
        if is_gone:
            self.path_of(file_id).unlink(missing_ok=True)
        return is_gone

    def insert(self, file: StoredFile) -> None:
        """Let a file whose content is there be known.

        Raises:
            RequestError: there are too many bytes, or files, with it.
        """
        with self._database.writing() as db:
            ((num_files, own_bytes),) = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?", (file.owner,)
            ).fetchall()
            ((total_bytes,),) = db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM files").fetchall()
            if num_files >= MAX_FILES:
                raise RequestError(
                    f"{num_files} files are kept for you, and more are not: delete some",
                    param="file",
                    code="too_many_files",
                )
            self._check_room(total_bytes + file.num_bytes, own_bytes + file.num_bytes)
            insert_file(db, file, self._database.padding_bytes)

    def num_bytes(self) -> tuple[int, int]:
        """Number of files, and their bytes together."""
        ((num_files, total),) = self._database.rows("SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files")
        return num_files, total

    def sweep(self) -> None:
        """Remove what has expired, and contents that a killed server left."""
        with self._database.writing() as db:
            gone = f"expires_s IS NOT NULL AND expires_s <= ? AND NOT {_USED}"
            now_s = time.time()
            expired = [row[0] for row in db.execute(f"SELECT id FROM files WHERE {gone}", (now_s,))]
            if expired:
                self._database.erase(f"DELETE FROM files WHERE {gone}", (now_s,))
        for file_id in expired:
            self.path_of(file_id).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                self._remove_if_left_behind(path)

    def _remove_if_left_behind(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever writes holds it
                if not self._is_named(path.name):
                    path.unlink()
            finally:
                os.close(descriptor)

    def _is_named(self, file_id: str) -> bool:
        query = (
            "SELECT 1 FROM files WHERE id = ? UNION ALL SELECT 1 FROM batches WHERE output_file = ? OR error_file = ?"
        )
        return bool(self._database.rows(query, (file_id, file_id, file_id)))

    def _arrived(self, upload: FileUpload, num_bytes: int) -> None:
        """Another piece of an upload has come. Raises RequestError where there is no room for it."""
        with self._lock:
            is_new = upload not in self._arriving
            self._arriving[upload] = num_bytes
            total = sum(self._arriving.values())
            own = sum(size for each, size in self._arriving.items() if each.owner == upload.owner)
        if is_new:
            upload.kept_bytes = self._kept_bytes(upload.owner)
        self._check_room(upload.kept_bytes[0] + total, upload.kept_bytes[1] + own)

    def _ended(self, upload: FileUpload) -> None:
        with self._lock:
            self._arriving.pop(upload, None)

    def _kept_bytes(self, owner: str) -> tuple[int, int]:
        """Of all files, and of this owner's."""
        query = (
            "SELECT COALESCE(SUM(num_bytes), 0), COALESCE(SUM(CASE WHEN owner = ? THEN num_bytes END), 0) FROM files"
        )
        ((total, own),) = self._database.rows(query, (owner,))
        return total, own

    def _check_room(self, total_bytes: int, owner_bytes: int) -> None:
        if total_bytes > self._max_total_bytes or owner_bytes > self._max_owner_bytes:
            most = min(self._max_total_bytes, self._max_owner_bytes)
            whose = "all files" if total_bytes > self._max_total_bytes else "one API key's files"
            raise RequestError(
                f"there is no room for this file: {whose} may have {most} bytes together (--files-max-total-bytes); "
                "delete some, or let them expire (expires_after)",
                param="file",
                code="no_room",
            )


class FileUpload:
    """A file that is being written. Nothing of it is left unless it is kept.

    Args:
        store: Where it will be.
        owner: Whose it is.
    """

    def __init__(self, store: FileStore, owner: str) -> None:
        self.owner = owner
        self.id = new_file_id()
        self.num_bytes = 0
        self.kept_bytes = (0, 0)
        """Of all files and of this owner's, when it began."""
        self._store = store
        self._path = store.path_of(self.id)
        self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def write(self, data: bytes | memoryview) -> None:
        """Another piece.

        Raises:
            RequestError: there is no room for it.
            OSError: the disk is full.
        """
        assert self._descriptor is not None
        self._store._arrived(self, self.num_bytes + len(data))
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Let the content be on the disk."""
        assert self._descriptor is not None
        os.fsync(self._descriptor)

    def keep(self, *, purpose: str, filename: str, expires_after_s: int | None) -> StoredFile:
        """It is whole: from now on it is there.

        Raises:
            RequestError: there is no room for it.
        """
        created_s = int(time.time())
        file = StoredFile(
            id=self.id,
            owner=self.owner,
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_s=created_s,
            expires_s=None if expires_after_s is None else created_s + expires_after_s,
            filename=filename,
        )
        self._store.insert(file)
        self._close()
        return file

    def discard(self) -> None:
        """Leave nothing behind of what was not kept. Idempotent."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._store._ended(self)


@contextlib.contextmanager
def uploading(store: FileStore, owner: str) -> Iterator[FileUpload]:
    """An upload that is discarded unless it was kept."""
    upload = store.begin(owner)
    try:
        yield upload
    finally:
        upload.discard()


def insert_file(db: Any, file: StoredFile, padding_bytes: int) -> None:
    """A row for a file, in a transaction of the caller's."""
    file_row = (file.id, file.owner, file.purpose, file.num_bytes, file.created_s, file.expires_s)
    db.execute(
        "INSERT INTO files (id, owner, purpose, num_bytes, created_s, expires_s, padding, filename) "
        "VALUES (?, ?, ?, ?, ?, ?, zeroblob(?), ?)",
        (*file_row, padding_bytes, file.filename),
    )


def _stored(row: tuple[Any, ...]) -> StoredFile:
    file_id, owner, purpose, num_bytes, created_s, expires_s, filename = row
    return StoredFile(
        id=file_id,
        owner=owner,
        purpose=purpose,
        num_bytes=num_bytes,
        created_s=created_s,
        expires_s=expires_s,
        filename=filename,
    )
