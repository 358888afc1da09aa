"""Where finished and running responses are kept, so that later requests can go on from them.

`SQLiteResponseStore` is the default: one file, safe for several servers at once, entries forgotten after a time.
`make_response_store` finds others by their module. Knows JSON-ready values only; knows no API.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig

__all__ = [
    "ResponseStore",
    "SQLiteResponseStore",
    "StoredResponse",
    "check_response_store",
    "default_store_path",
    "make_response_store",
    "open_database",
    "store_path",
]

_PURGE_EVERY = 100
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, written_s REAL, response BLOB, input BLOB);
CREATE INDEX IF NOT EXISTS by_age ON responses (written_s);
CREATE TABLE IF NOT EXISTS response_items (id TEXT PRIMARY KEY, response TEXT);
"""


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response with what it answered."""

    response: dict[str, Any]
    """The response object, as clients get it."""
    input_items: list[dict[str, Any]]
    """What was new in its request; what came before is in the responses it follows."""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def previous_id(self) -> str | None:
        """The response it follows."""
        previous: str | None = self.response.get("previous_response_id")
        return previous


class ResponseStore(Protocol):
    """Keeps responses. Methods may block and are called from worker threads, several at a time."""

    def put(self, stored: StoredResponse) -> None:
        """Keep it, in place of what has the same id."""

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, None when it is unknown or forgotten."""

    def delete(self, response_id: str) -> bool:
        """Forget it; whether it was known."""

    def find_item(self, item_id: str) -> dict[str, Any] | None:
        """An input or output item of any response, by its id."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class SQLiteResponseStore:
    """A `ResponseStore` in one SQLite file.

    Args:
        path: The file, made with its folder when it is missing and readable by its owner only; ":memory:" keeps
            everything in this process.
        ttl_s: Responses are forgotten this long after they were last written.
        max_responses: The oldest are forgotten above this.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str | Path, *, ttl_s: float, max_responses: int) -> None:
        self._ttl_s = ttl_s
        self._max_responses = max_responses
        self._lock = threading.Lock()
        self._num_writes = 0
        self._db = open_database(path, _TABLES)
        self._purge()

    def put(self, stored: StoredResponse) -> None:
        response, items = msgspec.json.encode(stored.response), msgspec.json.encode(stored.input_items)
        with self._lock, self._db:
            self._db.execute("BEGIN")
            row = (stored.id, time.time(), response, items)
            self._db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", row)
            # The first response that has an item keeps it: nobody can put another one under an id that is known.
            ids = [(item["id"], stored.id) for item in _items(stored) if "id" in item]
            self._db.executemany("INSERT OR IGNORE INTO response_items VALUES (?, ?)", ids)
            self._num_writes += 1
            if self._num_writes % _PURGE_EVERY == 0:
                self._purge()

    def get(self, response_id: str) -> StoredResponse | None:
        with self._lock:
            row = self._db.execute(
                "SELECT response, input FROM responses WHERE id = ? AND written_s > ?",
                (response_id, time.time() - self._ttl_s),
            ).fetchone()
        if row is None:
            return None
        return StoredResponse(response=msgspec.json.decode(row[0]), input_items=msgspec.json.decode(row[1]))

    def find_item(self, item_id: str) -> dict[str, Any] | None:
        with self._lock:
            row = self._db.execute("SELECT response FROM response_items WHERE id = ?", (item_id,)).fetchone()
        stored = None if row is None else self.get(row[0])
        return next((item for item in _items(stored) if item.get("id") == item_id), None)

    def delete(self, response_id: str) -> bool:
        with self._lock:
            return self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _purge(self) -> None:
        self._db.execute("DELETE FROM responses WHERE written_s <= ?", (time.time() - self._ttl_s,))
        self._db.execute(
            "DELETE FROM responses WHERE id IN (SELECT id FROM responses ORDER BY written_s DESC LIMIT -1 OFFSET ?)",
            (self._max_responses,),
        )
        self._db.execute("DELETE FROM response_items WHERE response NOT IN (SELECT id FROM responses)")


def _items(stored: StoredResponse | None) -> list[dict[str, Any]]:
    """What it was asked and what it answered."""
    return [] if stored is None else [*stored.input_items, *stored.response.get("output", ())]


def open_database(path: str | Path, tables: str) -> sqlite3.Connection:
    """A SQLite file with these tables; made with its folder when it is missing, readable by its owner only.

    Raises:
        ConfigError: the file cannot be used.
    """
    if str(path) != ":memory:":
        path = Path(path).expanduser()
    try:
        if isinstance(path, Path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        db = sqlite3.connect(path, check_same_thread=False, timeout=10, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(tables)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"cannot keep responses in {str(path)!r}: {error}; name another file with --response-store, or 'none'",
            field="response_store",
        ) from None
    return db


def default_store_path() -> Path:
    """Where programs keep their state on this system (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "quire" / "responses.sqlite"


def store_path(config: ServerConfig) -> Path | None:
    """The file in which responses are kept; None where it is none."""
    name = config.response_store
    return None if name in ("none", ":memory:") or _is_function(name) else Path(name or default_store_path())


def make_response_store(config: ServerConfig) -> ResponseStore | None:
    """The configured store, None when responses are not kept.

    Raises:
        ConfigError: it cannot be made.
    """
    name = config.response_store
    if name == "none":
        return None
    if _is_function(name):
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
    if _is_function(name):
        _find_function(name)
    elif name not in (None, "none", ":memory:") and (store := make_response_store(config)) is not None:
        store.close()


def _is_function(name: str | None) -> TypeGuard[str]:
    return name is not None and ":" in name and name != ":memory:"


def _find_function(name: str) -> Callable[[ServerConfig], ResponseStore]:
    module, _, function = name.partition(":")
    try:
        found: Callable[[ServerConfig], ResponseStore] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no response store {name!r}: {error}; give a file, 'none', or module:function",
            field="response_store",
        ) from None
    return found
