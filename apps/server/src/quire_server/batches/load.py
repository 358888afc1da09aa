"""How many lines of batches run beside interactive requests: many while there are none of these, few while there are.

Knows no batch and no engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["InteractiveLoad", "InteractiveWatch", "LineSlots"]

QUIET_S = 1.0
"""Without requests for so long, there are none."""
MAX_DISPLACED = 2
"""How often a line makes way; from then on it runs to its end, so that batches get on whatever comes."""

Result = TypeVar("Result")


class InteractiveLoad:
    """The requests of clients that wait for their answers, and those of a moment ago: who asks once asks again."""

    def __init__(self) -> None:
        self.is_busy = False
        """Whether there are some, or were within `QUIET_S`."""
        self._num_requests = 0
        self._quiet: asyncio.TimerHandle | None = None
        self._slots: list[LineSlots] = []

    def tell(self, slots: LineSlots) -> None:
        """Let these slots know when it changes."""
        self._slots.append(slots)

    def begin(self) -> None:
        """One more."""
        self._num_requests += 1
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if not self.is_busy:
            self.is_busy = True
            for slots in self._slots:
                slots.make_way()

    def end(self) -> None:
        """One less."""
        self._num_requests -= 1
        if not self._num_requests:
            self._quiet = asyncio.get_running_loop().call_later(QUIET_S, self._on_quiet)

    def _on_quiet(self) -> None:
        self._quiet = None
        self.is_busy = False
        for slots in self._slots:
            slots.load_changed()


class InteractiveWatch:
    """The ASGI layer that counts them: POSTs to routes that compute, until their answers are written.

    Args:
        app: The routes.
        load: Where they are counted.
        paths: Of these routes.
    """

    def __init__(self, app: ASGIApp, load: InteractiveLoad, paths: Collection[str]) -> None:
        self._app, self._load, self._paths = app, load, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_counted = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"].removeprefix(scope.get("root_path", "")) in self._paths
        )
        if not is_counted:
            await self._app(scope, receive, send)
            return
        self._load.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.end()


class LineSlots:
    """Places for lines that run at the same time, given out in order of asking.

    Args:
        load: Of interactive requests.
        num_slots: While there are none.
        num_busy_slots: While there are some.
    """

    def __init__(self, load: InteractiveLoad, num_slots: int, num_busy_slots: int) -> None:
        self._load = load
        self.num_slots, self._num_busy_slots = num_slots, min(num_slots, num_busy_slots)
        self.num_taken = 0
        """Lines that run."""
        self.num_displaced = 0
        """Times that a line made way."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running: dict[asyncio.Future[Any], None] = {}
        """Work that may be begun again, in the order in which it was begun."""
        self._displaced: set[asyncio.Future[Any]] = set()
        load.tell(self)

    @property
    def limit(self) -> int:
        """Lines that may run now."""
        return self._num_busy_slots if self._load.is_busy else self.num_slots

    async def take(self) -> None:
        """Wait for a place."""
        if not self._waiting and self.num_taken < self.limit:
            self.num_taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    async def run(self, begin: Callable[[], Awaitable[Result]]) -> Result:
        """Run work when there is a place for it. When requests come, it may be cancelled, to be begun again when there
        is a place again.

        Args:
            begin: Begins the work.
        """
        num_displaced = 0
        while True:
            await self.take()
            work = asyncio.ensure_future(begin())
            if num_displaced < MAX_DISPLACED:
                self._running[work] = None
            try:
                return await work
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if work not in self._displaced or (this is not None and this.cancelling()):
                    raise
                num_displaced += 1
            finally:
                self._running.pop(work, None)
                self._displaced.discard(work)
                self.give_back()

    def make_way(self) -> None:
        """Requests have come: of what runs beyond the limit the latest is cancelled, which loses least."""
        for work in reversed([*self._running][max(0, self.limit) :]):
            if self.num_taken - len(self._displaced) <= self.limit:
                return
            self._displaced.add(work)
            self.num_displaced += 1
            work.cancel()

    def give_back(self) -> None:
        """A line has ended."""
        self.num_taken -= 1
        self.load_changed()

    def load_changed(self) -> None:
        """Let in whom there is room for."""
        while self._waiting and self.num_taken < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.num_taken += 1
                turn.set_result(None)
