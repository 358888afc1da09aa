"""`EngineWatcher`: fetches reports from the engines while somebody looks, once for all who look. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple

from quire_engine import EngineClient
from quire_interfaces import EngineDeadError, QuireError
from quire_interfaces.engine_watch import RequestRecord, StepRecord, WatchCursor, WatchReport

__all__ = ["NUM_STEPS", "EngineNews", "EngineState", "EngineWatcher"]

_logger = logging.getLogger(__name__)

INTERVAL_S = 0.2
"""Between two reports of an engine."""
RETRY_S = 1.0
"""Until the next try, where an engine gave no report."""
RANKS_INTERVAL_S = 2.0
"""How often the ranks of the engines are asked for."""
NUM_STEPS = 200
"""Steps that who begins to look is shown."""
NUM_FINISHED = 50
"""Finished requests that who begins to look is shown."""
MAX_WAITING_NEWS = 32
"""News that wait for a slow client; then it begins anew."""


class EngineNews(NamedTuple):
    """What is told of one engine."""

    rank: int
    report: WatchReport | None
    """None while the engine gives none: it is being started again, or is gone."""
    clock_offset_s: float
    """`time.time()` less the clock of the report."""


@dataclass(slots=True)
class EngineState:
    """All that is known of one engine now."""

    last: WatchReport | None = None
    clock_offset_s: float = 0.0
    holders: list[int] = field(default_factory=list)
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    """By number, those that are not finished."""
    finished: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=NUM_FINISHED))

    def apply(self, report: WatchReport) -> None:
        """Take a report in."""
        if report.is_anew:
            self.holders = list(report.holders)
            self.steps.clear()
            self.requests.clear()
            self.finished.clear()
        for block_id, holder in report.changes:
            self.holders[block_id - 1] = holder
        self.steps.extend(report.steps)
        for record in report.requests:
            if record.finished_s:
                self.requests.pop(record.number, None)
                self.finished.append(record)
            else:
                self.requests[record.number] = record
        self.last, self.clock_offset_s = report, time.time() - report.now_s

    def anew(self) -> WatchReport | None:
        """A report for who has read nothing yet; None while nothing is known."""
        last = self.last
        if last is None:
            return None
        return WatchReport(
            cursor=last.cursor,
            is_anew=True,
            now_s=last.now_s,
            num_blocks=last.num_blocks,
            block_size=last.block_size,
            steps=list(self.steps),
            holders=self.holders,
            requests=[*self.finished, *self.requests.values()],
            rows=last.rows,
            waiting_reasons=last.waiting_reasons,
            totals=last.totals,
            watch_share=last.watch_share,
            num_restarts=last.num_restarts,
        )


class _Subscriber:
    def __init__(self) -> None:
        self.news: asyncio.Queue[EngineNews] = asyncio.Queue(MAX_WAITING_NEWS)


class EngineWatcher:
    """Shares the reports of all engines out. All calls from one event loop.

    Args:
        client: The engine, or engines.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._name = secrets.token_hex(4)
        self._states: dict[int, EngineState] = {}
        self._subscribers: set[_Subscriber] = set()
        self._task: asyncio.Task[None] | None = None

    async def news(self) -> AsyncGenerator[EngineNews, None]:
        """What is known now, then what happens, until the generator is closed. The engines are watched meanwhile."""
        subscriber = _Subscriber()
        self._subscribers.add(subscriber)
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch())
        try:
            for each in self._all_anew():
                yield each
            while True:
                yield await subscriber.news.get()
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers and self._task is not None:
                self._task.cancel()
                self._task = None
                self._states.clear()

    def _all_anew(self) -> list[EngineNews]:
        known = ((rank, state, state.anew()) for rank, state in self._states.items())
        return [EngineNews(rank, report, state.clock_offset_s) for rank, state, report in known if report is not None]

    def _tell(self, news: EngineNews) -> None:
        for subscriber in self._subscribers:
            if subscriber.news.full():  # it reads slower than we tell
                while not subscriber.news.empty():
                    subscriber.news.get_nowait()
                for each in self._all_anew():
                    subscriber.news.put_nowait(each)
            else:
                subscriber.news.put_nowait(news)

    async def _watch(self) -> None:
        """Watch all engines that there are, which may become more or fewer."""
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                with contextlib.suppress(QuireError):
                    ranks = await self._client.engine_ranks()
                    for rank in set(ranks) - tasks.keys():
                        tasks[rank] = asyncio.ensure_future(self._watch_one(rank))
                    for rank in tasks.keys() - set(ranks):
                        tasks.pop(rank).cancel()
                        self._states.pop(rank, None)
                await asyncio.sleep(RANKS_INTERVAL_S)
        finally:
            for task in tasks.values():
                task.cancel()
            with contextlib.suppress(QuireError, asyncio.CancelledError):
                await asyncio.shield(asyncio.ensure_future(self._leave()))

    async def _leave(self) -> None:
        with contextlib.suppress(QuireError):  # without it, the engine notices by itself
            await self._client.leave_watch(self._name)

    async def _watch_one(self, rank: int) -> None:
        state = self._states[rank] = EngineState()
        cursor = WatchCursor()
        while True:
            try:
                report = await self._client.watch(rank, self._name, cursor)
            except QuireError as error:
                if not isinstance(error, EngineDeadError):
                    _logger.debug("engine %d gives no report: %s", rank, error)
                self._tell(EngineNews(rank, None, 0.0))
                await asyncio.sleep(RETRY_S)
                continue
            cursor = report.cursor
            state.apply(report)
            self._tell(EngineNews(rank, report, state.clock_offset_s))
            await asyncio.sleep(INTERVAL_S)
