"""When turns of live sound are transcribed: those that have ended at once, those that still run only where that delays
nobody.

All sessions of a server share one `LivePace`. Its clock is that of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

__all__ = ["LivePace"]

REST = 1.0
"""After a transcript of a running turn, so many times what it took pass without one."""


class LivePace:
    """Lets transcripts of running turns through one by one, while none of a turn that has ended is due."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._num_final = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._rests_until_s = 0.0

    @contextlib.contextmanager
    def final(self) -> Iterator[None]:
        """A turn that has ended is transcribed inside."""
        self._num_final += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_final -= 1
            if not self._num_final:
                self._is_idle.set()

    @contextlib.asynccontextmanager
    async def partial(self) -> AsyncIterator[None]:
        """A running turn is transcribed inside; waits until there is time for it."""
        loop = asyncio.get_running_loop()
        async with self._one:
            while (rest_s := self._rests_until_s - loop.time()) > 0 or not self._is_idle.is_set():
                await (asyncio.sleep(rest_s) if rest_s > 0 else self._is_idle.wait())
            begin_s = loop.time()
            try:
                yield
            finally:
                now_s = loop.time()
                self._rests_until_s = now_s + REST * (now_s - begin_s)
