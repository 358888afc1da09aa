"""Where conversations are kept: lists of items that grow with each response, beside the kept responses.

Knows JSON-ready values only; knows no API.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire_server.config import ServerConfig
from quire_server.response_store import is_function, item_digest, store_path
from quire_server.sqlite_file import SQLiteFile, has_table

__all__ = ["ConversationStore", "SQLiteConversationStore", "keeps_conversations", "make_conversation_store"]

Item = dict[str, Any]

_TABLES = (
    "CREATE TABLE IF NOT EXISTS owned_conversations (id TEXT PRIMARY KEY, owner TEXT NOT NULL, "
    "written_s REAL NOT NULL, padding BLOB NOT NULL, object BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS owned_conversations_by_age ON owned_conversations (written_s)",
    "CREATE TABLE IF NOT EXISTS owned_conversation_items (place INTEGER PRIMARY KEY AUTOINCREMENT, "
    "conversation TEXT NOT NULL REFERENCES owned_conversations ON DELETE CASCADE, digest BLOB NOT NULL, "
    "padding BLOB NOT NULL, item BLOB NOT NULL)",
    "CREATE UNIQUE INDEX IF NOT EXISTS owned_items_of_conversation ON owned_conversation_items (conversation, digest)",
    "CREATE INDEX IF NOT EXISTS owned_conversation_items_by_digest ON owned_conversation_items (digest)",
)
_ITEMS = (
    "FROM owned_conversation_items JOIN owned_conversations AS each ON each.id = conversation "
    "WHERE each.owner = ? AND each.written_s > ?"
)


class ConversationStore(Protocol):
    """Keeps conversations, each for its owner alone: to another one it is not there. Methods may block and are called
    from worker threads, several at a time."""

    def put(self, conversation: dict[str, Any], *, owner: str) -> None:
        """Keep the object, in place of what has the same id; its items stay."""

    def get(self, conversation_id: str, *, owner: str) -> dict[str, Any] | None:
        """The object, None when it is unknown, forgotten, or another's."""

    def delete(self, conversation_id: str, *, owner: str) -> bool:
        """Forget it with its items; whether it was there for this owner."""

    def append(self, conversation_id: str, items: Sequence[Item], *, owner: str) -> bool:
        """Put items behind the others, those that are there already left out; whether the conversation is there. Of an
        unknown one nothing is kept."""

    def items(self, conversation_id: str, *, owner: str) -> list[Item]:
        """All items, the oldest first."""

    def find_item(self, item_id: str, *, owner: str) -> Item | None:
        """An item of any of the owner's conversations, the oldest where several have it."""

    def delete_item(self, conversation_id: str, item_id: str, *, owner: str) -> bool:
        """Take one item out; whether it was there."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class SQLiteConversationStore:
    """A `ConversationStore` in a SQLite file.

    Args:
        path: The file; ":memory:" keeps everything in this process. Conversations of a version without owners are
            those of a server without keys.
        ttl_s: Conversations are forgotten this long after they last changed.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str | Path, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._file = SQLiteFile(path, _TABLES, _migrated)
        with self._file.writing():
            self._purge()

    def put(self, conversation: dict[str, Any], *, owner: str) -> None:
        row = (conversation["id"], owner, time.time(), self._file.padding_bytes, msgspec.json.encode(conversation))
        with self._file.writing():
            self._file.erase(
                "INSERT INTO owned_conversations VALUES (?, ?, ?, zeroblob(?), ?) ON CONFLICT (id) DO UPDATE SET "
                "owner = excluded.owner, written_s = excluded.written_s, object = excluded.object",
                row,
            )
            self._purge()

    def get(self, conversation_id: str, *, owner: str) -> dict[str, Any] | None:
        rows = self._file.rows(
            "SELECT object FROM owned_conversations WHERE id = ? AND owner = ? AND written_s > ?",
            (conversation_id, owner, self._horizon_s()),
        )
        return msgspec.json.decode(rows[0][0]) if rows else None

    def delete(self, conversation_id: str, *, owner: str) -> bool:
        statement = "DELETE FROM owned_conversations WHERE id = ? AND owner = ? AND written_s > ?"
        with self._file.writing():
            return self._file.erase(statement, (conversation_id, owner, self._horizon_s())) > 0

    def append(self, conversation_id: str, items: Sequence[Item], *, owner: str) -> bool:
        now_s = time.time()
        with self._file.writing() as db:
            touched = db.execute(
                "UPDATE owned_conversations SET written_s = ? WHERE id = ? AND owner = ? AND written_s > ?",
                (now_s, conversation_id, owner, self._horizon_s()),
            ).rowcount
            if touched:
                _insert_items(db, conversation_id, items, self._file.padding_bytes)
            self._purge()
        return touched > 0

    def items(self, conversation_id: str, *, owner: str) -> list[Item]:
        rows = self._file.rows(
            f"SELECT item {_ITEMS} AND conversation = ? ORDER BY place", (owner, self._horizon_s(), conversation_id)
        )
        return [msgspec.json.decode(row[0]) for row in rows]

    def find_item(self, item_id: str, *, owner: str) -> Item | None:
        rows = self._file.rows(
            f"SELECT item {_ITEMS} AND digest = ? ORDER BY place LIMIT 1",
            (owner, self._horizon_s(), item_digest(item_id)),
        )
        return msgspec.json.decode(rows[0][0]) if rows else None

    def delete_item(self, conversation_id: str, item_id: str, *, owner: str) -> bool:
        statement = (
            f"DELETE FROM owned_conversation_items WHERE place IN (SELECT place {_ITEMS} AND conversation = ? "
            "AND digest = ?)"
        )
        values = (owner, self._horizon_s(), conversation_id, item_digest(item_id))
        with self._file.writing():
            return self._file.erase(statement, values) > 0

    def close(self) -> None:
        self._file.close()

    def _horizon_s(self) -> float:
        """What last changed before this is forgotten."""
        return time.time() - self._ttl_s

    def _purge(self) -> None:
        self._file.erase("DELETE FROM owned_conversations WHERE written_s <= ?", (self._horizon_s(),))


def _insert_items(db: sqlite3.Connection, conversation_id: str, items: Sequence[Item], padding_bytes: int) -> None:
    db.executemany(
        "INSERT OR IGNORE INTO owned_conversation_items (conversation, digest, padding, item) "
        "VALUES (?, ?, zeroblob(?), ?)",
        [(conversation_id, item_digest(item["id"]), padding_bytes, msgspec.json.encode(item)) for item in items],
    )


def _migrated(db: sqlite3.Connection, padding_bytes: int) -> bool:
    """Take over the tables of the version without owners; whether there were any."""
    if not has_table(db, "conversations"):
        return False
    for statement in _TABLES:
        db.execute(statement)
    db.execute(
        "INSERT OR IGNORE INTO owned_conversations SELECT id, '', written_s, zeroblob(?), object FROM conversations",
        (padding_bytes,),
    )
    old = db.execute(
        "SELECT conversation, item FROM conversation_items WHERE conversation IN (SELECT id FROM conversations) "
        "ORDER BY place"
    )
    for conversation_id, item in old:
        _insert_items(db, conversation_id, [msgspec.json.decode(item)], padding_bytes)
    db.execute("DROP TABLE conversation_items")
    db.execute("DROP TABLE conversations")
    return True


def keeps_conversations(config: ServerConfig) -> bool:
    """Whether they are kept: in the file of the responses, not where these are kept by a store of another make."""
    return config.response_store != "none" and not is_function(config.response_store)


def make_conversation_store(config: ServerConfig) -> ConversationStore:
    """The configured store, for a server that keeps them.

    Raises:
        ConfigError: it cannot be made.
    """
    return SQLiteConversationStore(store_path(config) or ":memory:", ttl_s=config.response_store_ttl_s)
