"""Where finished and running responses are kept, so that later requests can go on from them.

`SQLiteResponseStore` is the default: one file, safe for several servers at once, entries forgotten after a time.
`make_response_store` finds others by their module. Knows JSON-ready values only; knows no API.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.sqlite_file import SQLiteFile, has_table

__all__ = [
    "ResponseStore",
    "SQLiteResponseStore",
    "StoredResponse",
    "check_response_store",
    "default_store_path",
    "is_function",
    "item_digest",
    "make_response_store",
    "store_path",
]

_TABLES = (
    "CREATE TABLE IF NOT EXISTS owned_responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, written_s REAL NOT NULL, "
    "padding BLOB NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS owned_responses_by_age ON owned_responses (written_s)",
    "CREATE INDEX IF NOT EXISTS owned_responses_by_owner ON owned_responses (owner, written_s)",
    "CREATE TABLE IF NOT EXISTS owned_response_items (owner TEXT NOT NULL, digest BLOB NOT NULL, "
    "response TEXT NOT NULL REFERENCES owned_responses ON DELETE CASCADE)",
    "CREATE INDEX IF NOT EXISTS owned_response_items_by_digest ON owned_response_items (owner, digest)",
    "CREATE INDEX IF NOT EXISTS owned_response_items_by_response ON owned_response_items (response)",
)


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response with what it answered."""

    response: dict[str, Any]
    """The response object, as clients get it."""
    input_items: list[dict[str, Any]]
    """What was new in its request; what came before is in the responses it follows."""
    owner: str = ""
    """Whose it is (`quire_server.callers.Caller.owner`); "" on a server without keys."""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def previous_id(self) -> str | None:
        """The response it follows."""
        previous: str | None = self.response.get("previous_response_id")
        return previous


class ResponseStore(Protocol):
    """Keeps responses, each for its owner alone: to another one it is not there. Methods may block and are called from
    worker threads, several at a time. What they raise is logged, and told to the client as a store that failed."""

    def put(self, stored: StoredResponse) -> None:
        """Keep it, in place of what has the same id."""

    def get(self, response_id: str, *, owner: str) -> StoredResponse | None:
        """The response, None when it is unknown, forgotten, or another's."""

    def delete(self, response_id: str, *, owner: str) -> bool:
        """Forget it; whether it was there for this owner."""

    def find_item(self, item_id: str, *, owner: str) -> dict[str, Any] | None:
        """An input or output item of any of the owner's responses, by its id; the oldest where several have it. Ids of
        input items are the clients' choice: owners may have the same ones."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class SQLiteResponseStore:
    """A `ResponseStore` in one SQLite file.

    Args:
        path: The file, made with its folder when it is missing and readable by its owner only; ":memory:" keeps
            everything in this process. One of a version without owners is taken over: what is in it is that of a
            server without keys.
        ttl_s: Responses are forgotten this long after they were last written.
        max_responses: Above this, the oldest of the owner with the most responses are forgotten.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str | Path, *, ttl_s: float, max_responses: int) -> None:
        self._ttl_s = ttl_s
        self._max_responses = max_responses
        self._file = SQLiteFile(path, _TABLES, _migrated)
        with self._file.writing() as db:
            self._purge(db)

    def put(self, stored: StoredResponse) -> None:
        response, items = msgspec.json.encode(stored.response), msgspec.json.encode(stored.input_items)
        with self._file.writing() as db:
            row = (stored.id, stored.owner, time.time(), self._file.padding_bytes, response, items)
            _insert(db, row, _items(stored))
            self._purge(db)

    def get(self, response_id: str, *, owner: str) -> StoredResponse | None:
        rows = self._file.rows(
            "SELECT response, input FROM owned_responses WHERE id = ? AND owner = ? AND written_s > ?",
            (response_id, owner, self._horizon_s()),
        )
        return _stored(rows, owner)

    def find_item(self, item_id: str, *, owner: str) -> dict[str, Any] | None:
        rows = self._file.rows(
            "SELECT each.response, input FROM owned_response_items AS item "
            "JOIN owned_responses AS each ON each.id = item.response "
            "WHERE item.owner = ? AND digest = ? AND written_s > ? ORDER BY item.rowid LIMIT 1",
            (owner, item_digest(item_id), self._horizon_s()),
        )
        return next((item for item in _items(_stored(rows, owner)) if item.get("id") == item_id), None)

    def delete(self, response_id: str, *, owner: str) -> bool:
        statement = "DELETE FROM owned_responses WHERE id = ? AND owner = ? AND written_s > ?"
        with self._file.writing():
            return self._file.erase(statement, (response_id, owner, self._horizon_s())) > 0

    def close(self) -> None:
        self._file.close()

    def _horizon_s(self) -> float:
        """What was written before this is forgotten."""
        return time.time() - self._ttl_s

    def _purge(self, db: sqlite3.Connection) -> None:
        """Forget what is too old or too much. The owner with the most responses pays, so that nobody pushes out what
        others keep."""
        self._file.erase("DELETE FROM owned_responses WHERE written_s <= ?", (self._horizon_s(),))
        ((num_kept,),) = db.execute("SELECT COUNT(*) FROM owned_responses").fetchall()
        while num_kept > self._max_responses:
            (owner, most), *others = db.execute(
                "SELECT owner, COUNT(*) FROM owned_responses GROUP BY owner ORDER BY COUNT(*) DESC LIMIT 2"
            ).fetchall()
            lead = most - others[0][1] if others else most
            num_kept -= self._file.erase(
                "DELETE FROM owned_responses WHERE id IN (SELECT id FROM owned_responses WHERE owner = ? "
                "ORDER BY written_s, rowid LIMIT ?)",
                (owner, min(num_kept - self._max_responses, max(lead, 1))),
            )


def item_digest(item_id: str) -> bytes:
    """What an index holds of an item's id, which is the client's choice and may be any text."""
    return hashlib.blake2b(item_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _insert(db: sqlite3.Connection, row: tuple[Any, ...], items: Sequence[dict[str, Any]]) -> None:
    """A response in place of what has its id; the row is its id, owner, time, number of padding bytes and texts."""
    db.execute(
        "INSERT INTO owned_responses VALUES (?, ?, ?, zeroblob(?), ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "owner = excluded.owner, written_s = excluded.written_s, response = excluded.response, input = excluded.input",
        row,
    )
    db.execute("DELETE FROM owned_response_items WHERE response = ?", row[:1])
    ids = [(row[1], item_digest(str(item["id"])), row[0]) for item in items if "id" in item]
    db.executemany("INSERT INTO owned_response_items VALUES (?, ?, ?)", ids)


def _migrated(db: sqlite3.Connection, padding_bytes: int) -> bool:
    """Take over the tables of the version without owners; whether there were any."""
    if not has_table(db, "responses"):
        return False
    for statement in _TABLES:
        db.execute(statement)
    for name, written_s, *texts in db.execute("SELECT id, written_s, response, input FROM responses"):
        items = _items(_stored([tuple(texts)], ""))
        _insert(db, (name, "", written_s, padding_bytes, *texts), items)
    db.execute("DROP TABLE responses")
    db.execute("DROP TABLE IF EXISTS response_items")
    return True


def _stored(rows: list[tuple[Any, ...]], owner: str) -> StoredResponse | None:
    if not rows:
        return None
    response, items = map(msgspec.json.decode, rows[0])
    return StoredResponse(response=response, input_items=items, owner=owner)


def _items(stored: StoredResponse | None) -> list[dict[str, Any]]:
    """What it was asked and what it answered."""
    return [] if stored is None else [*stored.input_items, *stored.response.get("output", ())]


def default_store_path() -> Path:
    """Where programs keep their state on this system (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "quire" / "responses.sqlite"


def store_path(config: ServerConfig) -> Path | None:
    """The file in which responses are kept; None where it is none."""
    name = config.response_store
    return None if name in ("none", ":memory:") or is_function(name) else Path(name or default_store_path())


def make_response_store(config: ServerConfig) -> ResponseStore | None:
    """The configured store, None when responses are not kept.

    Raises:
        ConfigError: it cannot be made.
    """
    name = config.response_store
    if name == "none":
        return None
    if is_function(name):
        return _find_function(name)(config)
    return SQLiteResponseStore(
        store_path(config) or ":memory:",
        ttl_s=config.response_store_ttl_s,
        max_responses=config.response_store_max_responses,
    )


def check_response_store(config: ServerConfig) -> None:
    """Whether the store that was asked for can be used, before a request needs it. A store in the user's state folder,
    which nobody asked for, may fail later: a server without such a folder still serves the rest.

    Raises:
        ConfigError: it cannot.
    """
    name = config.response_store
    if is_function(name):
        _find_function(name)
    elif name not in (None, "none", ":memory:") and (store := make_response_store(config)) is not None:
        store.close()


def is_function(name: str | None) -> TypeGuard[str]:
    """Whether a store is named by the function that makes it."""
    return name is not None and ":" in name and name != ":memory:"


def _find_function(name: str) -> Callable[[ServerConfig], ResponseStore]:
    module, _, function = name.partition(":")
    try:
        function_of: Callable[[ServerConfig], ResponseStore] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no response store {name!r}: {error}; give a file, 'none', or module:function",
            field="response_store",
        ) from None
    return function_of
