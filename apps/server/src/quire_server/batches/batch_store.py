"""What batches are and how far they are, in the rows beside those of files. Knows no line and no engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire_server.files.file_store import UNFINISHED, StoredFile, insert_file
from quire_server.sqlite_file import SQLiteFile

__all__ = ["BatchStore", "StoredBatch"]

_FIELDS = "id, owner, input_file, output_file, error_file, object"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """One batch."""

    id: str
    owner: str
    """Who made it, and whose results are (`quire_server.callers.Caller.owner`)."""
    input_file: str
    output_file: str
    """Id under which answers are written; a file of the owner's once the batch is done, unless there are none."""
    error_file: str
    """The same of refusals."""
    object: dict[str, Any]
    """As clients get it."""

    @property
    def status(self) -> str:
        """See `object`."""
        return str(self.object["status"])


class BatchStore:
    """All batches of a server. Methods may block and are called from several threads.

    Args:
        database: See `quire_server.files.file_store.open_database`.
    """

    def __init__(self, database: SQLiteFile) -> None:
        self._database = database

    def add(self, batch: StoredBatch) -> None:
        """A new one."""
        row = (batch.id, batch.owner, batch.status, batch.input_file, batch.output_file, batch.error_file)
        with self._database.writing() as db:
            db.execute(
                "INSERT INTO batches (id, owner, status, input_file, output_file, error_file, padding, object) "
                "VALUES (?, ?, ?, ?, ?, ?, zeroblob(?), ?)",
                (*row, self._database.padding_bytes, msgspec.json.encode(batch.object)),
            )

    def get(self, batch_id: str, *, owner: str) -> StoredBatch | None:
        """The batch, None when it is unknown, or another's."""
        rows = self._database.rows(f"SELECT {_FIELDS} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner))
        return _stored(rows[0]) if rows else None

    def listed(self, *, owner: str, after: str | None, limit: int) -> list[StoredBatch] | None:
        """At most `limit` batches of an owner, the newest first; None where `after` is none of them."""
        condition, values = "owner = ?", [owner]
        if after is not None:
            found = self._database.rows("SELECT place FROM batches WHERE id = ? AND owner = ?", (after, owner))
            if not found:
                return None
            condition, values = f"{condition} AND place < ?", [*values, found[0][0]]
        query = f"SELECT {_FIELDS} FROM batches WHERE {condition} ORDER BY place DESC LIMIT ?"
        return [_stored(row) for row in self._database.rows(query, (*values, limit))]

    def unfinished(self) -> list[StoredBatch]:
        """Those that are not done, of all owners, the oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT {_FIELDS} FROM batches WHERE status IN ({marks}) ORDER BY place"
        return [_stored(row) for row in self._database.rows(query, UNFINISHED)]

    def num_unfinished(self, owner: str) -> int:
        """Of one owner."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({marks})"
        ((count,),) = self._database.rows(query, (owner, *UNFINISHED))
        return int(count)

    def num_by_status(self) -> dict[str, int]:
        """Of all owners."""
        return dict(self._database.rows("SELECT status, COUNT(*) FROM batches GROUP BY status"))

    def change(
        self, batch_id: str, change: Callable[[dict[str, Any]], None], *, files: Sequence[StoredFile] = ()
    ) -> dict[str, Any]:
        """Change the object as it is now, and let files be known, all in one transaction; the object afterwards.

        Args:
            batch_id: Of a batch that is there.
            change: Changes the object; what it raises leaves everything as it was.
            files: Whose contents are there.
        """
        with self._database.writing() as db:
            ((text,),) = db.execute("SELECT object FROM batches WHERE id = ?", (batch_id,)).fetchall()
            batch: dict[str, Any] = msgspec.json.decode(text)
            change(batch)
            self._write(db, batch)
            for file in files:
                insert_file(db, file, self._database.padding_bytes)
        return batch

    def _write(self, db: sqlite3.Connection, batch: dict[str, Any]) -> None:
        db.execute(
            "UPDATE batches SET status = ?, object = ? WHERE id = ?",
            (batch["status"], msgspec.json.encode(batch), batch["id"]),
        )


def _stored(row: tuple[Any, ...]) -> StoredBatch:
    batch_id, owner, input_file, output_file, error_file, text = row
    return StoredBatch(
        id=batch_id,
        owner=owner,
        input_file=input_file,
        output_file=output_file,
        error_file=error_file,
        object=msgspec.json.decode(text),
    )
