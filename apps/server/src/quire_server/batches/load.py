"""How many lines of batches run beside interactive requests: many while there are none of these, few while there are.

Knows no batch and no engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["InteractiveLoad", "InteractiveWatch", "LineSlots"]


class InteractiveLoad:
    """The requests of clients that wait for their answers."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._slots: list[LineSlots] = []

    def tell(self, slots: LineSlots) -> None:
        """Let these slots know when it changes."""
        self._slots.append(slots)

    def begin(self) -> None:
        """One more."""
        self.num_requests += 1
        if self.num_requests == 1:
            for slots in self._slots:
                slots.load_changed()

    def end(self) -> None:
        """One less."""
        self.num_requests -= 1
        if not self.num_requests:
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
        is_counted = scope["type"] == "websocket" or (
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
        self._num_slots, self._num_busy_slots = num_slots, min(num_slots, num_busy_slots)
        self.num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        load.tell(self)

    @property
    def limit(self) -> int:
        """Lines that may run now."""
        return self._num_busy_slots if self._load.num_requests else self._num_slots

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
