"""Where conversations are kept: lists of items that grow with each response, beside the kept responses.

Knows JSON-ready values only; knows no API.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from quire_server.config import ServerConfig
from quire_server.response_store import default_store_path, open_database

__all__ = ["ConversationStore", "SQLiteConversationStore", "make_conversation_store"]

Item = dict[str, Any]

_TABLES = """
CREATE TABLE IF NOT EXISTS conversations (id TEXT PRIMARY KEY, written_s REAL, object BLOB);
CREATE TABLE IF NOT EXISTS conversation_items (
    place INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT, id TEXT, item BLOB
);
CREATE INDEX IF NOT EXISTS items_of_conversation ON conversation_items (conversation, place);
CREATE INDEX IF NOT EXISTS items_by_id ON conversation_items (id);
"""


class ConversationStore(Protocol):
    """Keeps conversations. Methods may block and are called from worker threads, several at a time."""

    def put(self, conversation: dict[str, Any]) -> None:
        """Keep the object, in place of what has the same id; its items stay."""

    def get(self, conversation_id: str) -> dict[str, Any] | None:
        """The object, None when it is unknown or forgotten."""

    def delete(self, conversation_id: str) -> bool:
        """Forget it with its items; whether it was known."""

    def append(self, conversation_id: str, items: Sequence[Item]) -> None:
        """Put items behind the others, those that are there already left out. Of an unknown conversation nothing is
        kept."""

    def items(self, conversation_id: str) -> list[Item]:
        """All items, the oldest first."""

    def find_item(self, item_id: str) -> Item | None:
        """An item of any conversation."""

    def delete_item(self, conversation_id: str, item_id: str) -> bool:
        """Take one item out; whether it was there."""


class SQLiteConversationStore:
    """A `ConversationStore` in a SQLite file.

    Args:
        path: The file; ":memory:" keeps everything in this process.
        ttl_s: Conversations are forgotten this long after they last changed.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._db = open_database(path, _TABLES)
        with self._db:
            old = "SELECT id FROM conversations WHERE written_s <= ?"
            horizon = (time.time() - ttl_s,)
            self._db.execute(f"DELETE FROM conversation_items WHERE conversation IN ({old})", horizon)
            self._db.execute("DELETE FROM conversations WHERE written_s <= ?", horizon)

    def put(self, conversation: dict[str, Any]) -> None:
        row = (conversation["id"], time.time(), msgspec.json.encode(conversation))
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?, ?)", row)

    def get(self, conversation_id: str) -> dict[str, Any] | None:
        with self._lock:
            row = self._db.execute(
                "SELECT object FROM conversations WHERE id = ? AND written_s > ?",
                (conversation_id, time.time() - self._ttl_s),
            ).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def delete(self, conversation_id: str) -> bool:
        with self._lock:
            self._db.execute("DELETE FROM conversation_items WHERE conversation = ?", (conversation_id,))
            return self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,)).rowcount > 0

    def append(self, conversation_id: str, items: Sequence[Item]) -> None:
        rows = [(conversation_id, item["id"], msgspec.json.encode(item), conversation_id, item["id"]) for item in items]
        with self._lock, self._db:
            self._db.execute("BEGIN")
            touched = self._db.execute(
                "UPDATE conversations SET written_s = ? WHERE id = ?", (time.time(), conversation_id)
            ).rowcount
            if touched:
                self._db.executemany(
                    "INSERT INTO conversation_items (conversation, id, item) SELECT ?, ?, ? WHERE NOT EXISTS "
                    "(SELECT 1 FROM conversation_items WHERE conversation = ? AND id = ?)",
                    rows,
                )

    def items(self, conversation_id: str) -> list[Item]:
        with self._lock:
            rows = self._db.execute(
                "SELECT item FROM conversation_items WHERE conversation = ? ORDER BY place", (conversation_id,)
            ).fetchall()
        return [msgspec.json.decode(row[0]) for row in rows]

    def find_item(self, item_id: str) -> Item | None:
        with self._lock:
            row = self._db.execute("SELECT item FROM conversation_items WHERE id = ?", (item_id,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def delete_item(self, conversation_id: str, item_id: str) -> bool:
        with self._lock:
            return (
                self._db.execute(
                    "DELETE FROM conversation_items WHERE conversation = ? AND id = ?", (conversation_id, item_id)
                ).rowcount
                > 0
            )

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock, contextlib.suppress(Exception):
            self._db.close()


def make_conversation_store(config: ServerConfig) -> ConversationStore | None:
    """In the file of the responses; None where these are not kept, or kept by a store of another make.

    Raises:
        ConfigError: it cannot be made.
    """
    name = config.response_store
    if name == "none" or (name is not None and ":" in name and name != ":memory:"):
        return None
    return SQLiteConversationStore(name or str(default_store_path()), ttl_s=config.response_store_ttl_s)
