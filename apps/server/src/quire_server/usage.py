"""What each tenant has used: requests and tokens by day (UTC), counted as requests end and kept in a SQLite file.

Several API processes, and servers that share a file, add to the same sums. Knows no limit and no route.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

from quire_interfaces import ConfigError
from quire_observability import RequestTimes
from quire_server.config import ServerConfig
from quire_server.response_store import store_path
from quire_server.sqlite_file import SQLiteFile

__all__ = ["Usage", "UsageBook", "make_usage_book"]

_logger = logging.getLogger(__name__)

SECONDS_PER_DAY = 86400
SAVE_INTERVAL_S = 2.0
"""How often what was counted is written; a process that is killed loses as much of it."""
MAX_DAYS = 400
"""Days that are kept."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS usage (tenant TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL, "
    "prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, "
    "PRIMARY KEY (tenant, day))",
    "CREATE INDEX IF NOT EXISTS usage_by_day ON usage (day)",
)
_ADD = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, day) DO UPDATE SET "
    "requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
    "cached_tokens = cached_tokens + excluded.cached_tokens, "
    "completion_tokens = completion_tokens + excluded.completion_tokens"
)


@dataclass(slots=True)
class Usage:
    """Sums over requests that ended."""

    requests: int = 0
    """Sequences: each completion of `n`, each beam and each turn of a loop of tools counts."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were there already."""
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt tokens, cached ones included, and generated ones."""
        return self.prompt_tokens + self.completion_tokens

    def add(self, other: Usage) -> None:
        """Add sums to these."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


class UsageBook:
    """Sums by tenant and day.

    Args:
        file: Where they are kept; None forgets them at the end.
        clock: The time in seconds since 1970.
    """

    def __init__(self, file: SQLiteFile | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = file, clock
        self._saved: defaultdict[tuple[str, int], Usage] = defaultdict(Usage)
        """As they stood in the file when it was last written, other processes' counts included."""
        self._unsaved: defaultdict[tuple[str, int], Usage] = defaultdict(Usage)
        self.on_count: Callable[[str, Usage], None] = lambda tenant, usage: None
        """Hears of each request that ended: its tenant, and its sums."""
        self._read_today()

    @property
    def today(self) -> int:
        """Days since 1970, UTC."""
        return int(self._clock() // SECONDS_PER_DAY)

    @property
    def seconds_left_today(self) -> float:
        """Until the next day begins."""
        return SECONDS_PER_DAY - self._clock() % SECONDS_PER_DAY

    def count(self, metrics: RequestTimes) -> None:
        """A request of a tenant ended (a listener of `EngineMetrics`)."""
        if not metrics.tenant:
            return
        usage = Usage(1, metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_generation_tokens)
        self._unsaved[metrics.tenant, self.today].add(usage)
        self.on_count(metrics.tenant, usage)

    def of_day(self, tenant: str, day: int) -> Usage:
        """What a tenant used on a day that this process has seen."""
        sums = Usage()
        for part in (self._saved, self._unsaved):
            if (tenant, day) in part:
                sums.add(part[tenant, day])
        return sums

    def days(self, tenant: str, num_days: int) -> dict[str, Usage]:
        """Date (ISO 8601) -> what a tenant used on it, of the last days on which it used anything, oldest first."""
        first = self.today - num_days + 1
        if self._file is None:
            days = {day for name, day in self._unsaved if name == tenant and day >= first}
            found = {day: self.of_day(tenant, day) for day in days}
        else:
            query = "SELECT day, requests, prompt_tokens, cached_tokens, completion_tokens FROM usage "
            rows = self._file.rows(query + "WHERE tenant = ? AND day >= ?", (tenant, first))
            found = {day: Usage(*sums) for day, *sums in rows}
            for (name, day), usage in self._unsaved.items():
                if name == tenant and day >= first:
                    found.setdefault(day, Usage()).add(usage)
        return {_date(day): found[day] for day in sorted(found)}

    def save(self) -> None:
        """Write what was counted since the last time, and read what other processes counted today. Keeps it for the
        next time where the file cannot be written."""
        if self._file is None:
            return
        counted = {key: Usage(*astuple(usage)) for key, usage in self._unsaved.items()}
        if counted:
            with self._file.writing() as db:
                db.executemany(_ADD, [(*key, *astuple(usage)) for key, usage in counted.items()])
                db.execute("DELETE FROM usage WHERE day < ?", (self.today - MAX_DAYS,))
        for key, usage in counted.items():
            self._unsaved[key].add(Usage(*(-number for number in astuple(usage))))
            if self._unsaved[key] == Usage():
                del self._unsaved[key]
        self._read_today()

    async def keep_saving(self) -> None:
        """Save from time to time, until cancelled; then once more."""
        try:
            while True:
                await asyncio.sleep(SAVE_INTERVAL_S)
                self._save_or_warn()
        finally:
            self._save_or_warn()

    def _save_or_warn(self) -> None:
        try:
            self.save()
        except sqlite3.Error as error:
            _logger.warning("quire: the usage of tenants cannot be written: %s; it is kept in memory", error)

    def _read_today(self) -> None:
        if self._file is None:
            return
        query = "SELECT tenant, requests, prompt_tokens, cached_tokens, completion_tokens FROM usage WHERE day = ?"
        today = self.today
        rows = self._file.rows(query, (today,))
        self._saved.clear()
        self._saved.update({(tenant, today): Usage(*sums) for tenant, *sums in rows})


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * SECONDS_PER_DAY, UTC).date().isoformat()


def make_usage_book(config: ServerConfig) -> UsageBook:
    """The book of a server, in `usage.sqlite` beside its response store; without such a file, in memory.

    Raises:
        ConfigError: the file cannot be used, though the store was named.
    """
    path = store_path(config)
    if path is None:
        return UsageBook()
    try:
        remedy = "name another file with --response-store, or 'none', which keeps usage in memory"
        return UsageBook(_usage_file(path.expanduser().with_name("usage.sqlite"), remedy))
    except ConfigError as error:
        if config.response_store is not None:
            raise
        _logger.warning("quire: %s", error)
        return UsageBook()


def _usage_file(path: Path, remedy: str) -> SQLiteFile:
    return SQLiteFile(path, _TABLES, lambda db, padding: False, keeps="the usage of tenants", remedy=remedy)
