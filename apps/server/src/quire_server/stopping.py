"""SIGTERM and Ctrl-C, from the first moment of the process to the last. Knows no server and no engine.

Until there are requests to finish, a signal ends the process at once, with status 0: whoever stops a server that loads
waits for nothing, and sees no traceback. Then the first signal drains, and a second one ends the process at once.
Standard library alone, so that it is there before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["Stopping", "stopping_on_signals"]


class Stopping:
    """What the signals do."""

    def __init__(self) -> None:
        self._cleanups: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: asyncio.Event | None = None
        self.signal: int | None = None
        """The first one that came after `drains`."""

    def before_end(self, cleanup: Callable[[], None]) -> None:
        """Call `cleanup` before the process ends at once. It must be quick, and may be called at any moment."""
        self._cleanups.insert(0, cleanup)

    def drains(self) -> asyncio.Event:
        """From now on the first signal sets this event of the running loop."""
        import asyncio

        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        return self._asked

    def end_now(self, status: int) -> None:
        """End this process at once, after the cleanups; from any thread."""
        self._end(status)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self._loop is None or self._asked is None or self.signal is not None or self._loop.is_closed():
            self._end()
            return
        self.signal = number
        self._loop.call_soon_threadsafe(self._asked.set)

    def _end(self, status: int = 0) -> None:
        """End now. No exception would do: what is just being imported may catch it, or die of it with a traceback."""
        for cleanup in self._cleanups:
            with contextlib.suppress(Exception):
                cleanup()
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr.isatty():
                os.write(2, b"\r\x1b[K\x1b[?25h")  # a progress bar hides the cursor
        os._exit(status)


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[Stopping]:
    """Handle SIGTERM and Ctrl-C inside. Must be called from the main thread."""
    stopping = Stopping()
    former = {number: signal.signal(number, stopping.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
