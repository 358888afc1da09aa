"""A SQLite file that several servers may write at once, and from which deleted text is gone.

SQLite alone leaves deleted rows in free pages and in its write-ahead log: here they are overwritten, and the log is
emptied, before a deletion returns. Even then copies of rows would remain, for rows move between pages as a table grows
and shrinks. What does not fit into a row's page does not move, so text must stand behind a column `padding` of
`SQLiteFile.padding_bytes` zeros. Knows no table.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["SQLiteFile", "has_table"]

_PAGE_BYTES = 1024
"""Small, for each row has a padding of this size. Files of older versions keep theirs."""
BUSY_TIMEOUT_S = 10.0
"""How long a write waits for another server's."""


class SQLiteFile:
    """One connection, shared by threads.

    Args:
        path: The file, made with its folder when it is missing and readable by its owner only; ":memory:" keeps
            everything in this process.
        tables: Statements that make what is missing.
        migrate: Makes the tables from those of an older version, in the same transaction, with this many bytes of
            padding; returns whether there were any. The file is then written anew, without what older versions deleted.
        keeps: What is kept in it, in the plural.
        field: The setting that names it.
        remedy: What to do where it cannot be used.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        tables: Sequence[str],
        migrate: Callable[[sqlite3.Connection, int], bool],
        *,
        keeps: str = "responses",
        field: str = "response_store",
        remedy: str = "name another file with --response-store, or 'none'",
    ) -> None:
        self._lock = threading.Lock()
        self._owes_erasure = False
        """Whether the write-ahead log may still hold what was deleted."""
        self.padding_bytes = _PAGE_BYTES
        if str(path) != ":memory:":
            path = Path(path).expanduser()
        try:
            self._db = _connected(path)
            try:
                self._prepare(tables, migrate)
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cannot keep {keeps} in {str(path)!r}: {error}; {remedy}", field=field) from None

    def _prepare(self, tables: Sequence[str], migrate: Callable[[sqlite3.Connection, int], bool]) -> None:
        for pragma in (
            f"page_size={_PAGE_BYTES}",
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            "secure_delete=ON",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        ((self.padding_bytes,),) = self._db.execute("PRAGMA page_size").fetchall()
        with self.writing() as db:
            is_old = migrate(db, self.padding_bytes)
            for statement in tables:
                db.execute(statement)
        if is_old:
            self._db.execute("VACUUM")
            self._empty_log()

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a query finds."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction. What `erase` deleted in it is gone from the file when it ends, unless another server reads
        at that moment: then with the next transaction."""
        with self._lock:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
            if self._owes_erasure:
                self._empty_log()

    def erase(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement that deletes or replaces text, inside `writing`; the number of rows."""
        num_rows = self._db.execute(statement, values).rowcount
        self._owes_erasure |= num_rows > 0
        return num_rows

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _empty_log(self) -> None:
        self._owes_erasure = True
        with contextlib.suppress(sqlite3.Error):  # the transaction is written, whatever becomes of its log
            ((is_busy, _, _),) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._owes_erasure = bool(is_busy)


def _connected(path: str | Path) -> sqlite3.Connection:
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    return sqlite3.connect(path, check_same_thread=False, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def has_table(db: sqlite3.Connection, name: str) -> bool:
    """Whether there is such a table."""
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchall())
