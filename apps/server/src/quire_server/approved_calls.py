"""Calls of MCP tools that somebody approved: each is run once, whoever sends the approval again.

That a call was begun is written down before it is run, so that neither a retry, nor one at the same time, nor a restart
runs it again. What came of it is with the response that ran it, and nowhere else.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire_server.config import ServerConfig
from quire_server.mcp_tools import failed_call
from quire_server.response_store import StoredResponse, is_function, store_path
from quire_server.sqlite_file import SQLiteFile
from quire_server.store_access import StoreAccess, StoreFailedError

__all__ = ["ApprovedCalls", "BegunCalls"]

_TABLES = (
    "CREATE TABLE IF NOT EXISTS begun_calls (owner TEXT NOT NULL, digest BLOB NOT NULL, response TEXT NOT NULL, "
    "written_s REAL NOT NULL, PRIMARY KEY (owner, digest))",
    "CREATE INDEX IF NOT EXISTS begun_calls_by_age ON begun_calls (written_s)",
)
_MAX_KNOWN = 100
"""Calls whose outcomes are remembered, for requests whose responses are not kept."""
_OUTCOME = ("output", "error", "status")

Call = dict[str, Any]
Key = tuple[str, bytes]


class BegunCalls:
    """Which calls were begun, and for which response, in a SQLite file.

    Args:
        path: The file; ":memory:" keeps it in this process.
        ttl_s: Calls are forgotten after this time.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._file = SQLiteFile(path, _TABLES, lambda db, padding_bytes: False)

    def begin(self, key: Key, response_id: str) -> str | None:
        """Write down that a response begins a call; the response that began it before, None where it is the first."""
        now_s = time.time()
        with self._file.writing() as db:
            db.execute("DELETE FROM begun_calls WHERE written_s <= ?", (now_s - self._ttl_s,))
            row = (*key, response_id, now_s)
            if db.execute("INSERT OR IGNORE INTO begun_calls VALUES (?, ?, ?, ?)", row).rowcount:
                return None
            rows = db.execute("SELECT response FROM begun_calls WHERE owner = ? AND digest = ?", key)
            return str(rows.fetchone()[0])

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._file.close()


class ApprovedCalls:
    """Runs approved calls. All from one event loop.

    Args:
        config: Says where responses are kept; what was begun is written beside them, or where there is no such file
            remembered by this process.
    """

    def __init__(self, config: ServerConfig) -> None:
        in_file = config.response_store != "none" and not is_function(config.response_store)
        path = str((store_path(config) if in_file else None) or ":memory:")
        ttl_s = config.response_store_ttl_s
        self._begun = StoreAccess("begun calls", lambda: BegunCalls(path, ttl_s=ttl_s))
        self._known: OrderedDict[Key, asyncio.Task[Call]] = OrderedDict()

    async def run(
        self,
        owner: str,
        response_id: str,
        call: Call,
        work: Callable[[Call], Awaitable[None]],
        find: Callable[[str], Awaitable[StoredResponse | None]],
    ) -> None:
        """Run a call, unless it was run before; its item gets what came of it either way. It goes on to its end where
        the caller goes away: who comes back with the same approval is told of that.

        Args:
            owner: Whose approval it is.
            response_id: The response that runs it.
            call: The item, with `approval_request_id`.
            work: Runs it.
            find: A kept response.
        """
        named = [call[name] for name in ("approval_request_id", "server_label", "name", "arguments")]
        key = (owner, hashlib.blake2b(msgspec.json.encode(named), digest_size=16).digest())
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(self._run(key, response_id, dict(call), work, find))
            finished = [each for each, task in self._known.items() if task.done()]
            for each in finished[: max(0, len(finished) - _MAX_KNOWN)]:
                del self._known[each]
        try:
            call |= await asyncio.shield(self._known[key])
        except StoreFailedError as error:
            self._known.pop(key, None)
            call |= failed_call(f"the call was not run: {error}")

    async def _run(
        self,
        key: Key,
        response_id: str,
        call: Call,
        work: Callable[[Call], Awaitable[None]],
        find: Callable[[str], Awaitable[StoredResponse | None]],
    ) -> Call:
        before = await self._begun.ask(lambda store: store.begin(key, response_id))
        if before is None:
            await work(call)
            return {name: call[name] for name in _OUTCOME if name in call}
        stored = await find(before)
        for item in [] if stored is None else stored.response["output"]:
            if item.get("type") == "mcp_call" and item.get("approval_request_id") == call["approval_request_id"]:
                return {name: item[name] for name in _OUTCOME if name in item}
        return failed_call("the call was run before, for the same approval, and what came of it is not known here")
