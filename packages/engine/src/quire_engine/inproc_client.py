"""An engine client whose core runs in a thread of this process: for debugging, tests and embedding."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence

from quire_engine.config import EngineConfig
from quire_engine.core import EngineCore, EngineParts
from quire_engine.core_loop import CoreLoop
from quire_engine.listener import EngineListener
from quire_engine.messages import AddRequest, ClientMessage, CoreMessage, EngineInfo
from quire_engine.streaming_client import StreamingClient
from quire_engine.streams import OutputStream
from quire_interfaces import EngineDeadError

__all__ = ["InprocClient", "QueueInbox"]


class QueueInbox:
    """An `Inbox` filled from another thread of the same process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ClientMessage] = queue.SimpleQueue()

    def put(self, message: ClientMessage) -> None:
        self._queue.put(message)

    def receive(self, timeout_s: float) -> list[ClientMessage]:
        messages: list[ClientMessage] = []
        try:
            if timeout_s > 0:
                messages.append(self._queue.get(timeout=timeout_s))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class InprocClient(StreamingClient):
    """An `EngineClient` whose core runs in a thread of this process.

    Args:
        parts: Scheduler and executor; owned by the client from now on.
        config: As for a process.
        listener: Hears of steps and requests.
    """

    def __init__(
        self, parts: EngineParts, config: EngineConfig | None = None, listener: EngineListener | None = None
    ) -> None:
        super().__init__(config, listener)
        self._parts = parts
        self._inbox = QueueInbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Bounds what the core may be ahead of an event loop that is busy with something else.
        self._slots = threading.Semaphore(self.config.max_queued_messages)
        self._is_closed = False

    async def ready(self) -> EngineInfo:
        self.check_health()
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self.info = self._parts.info
            self._progress_s = time.monotonic()
            self._begin_watch()
            self._thread = threading.Thread(target=self._run, name="quire-engine-core", daemon=True)
            self._thread.start()
        return self._parts.info

    def _run(self) -> None:
        core = EngineCore(self._parts, self.config)
        try:
            CoreLoop(core, self._inbox, self._deliver).run()
        except Exception:  # the client was told by an EngineFailed message
            core.close()

    def _deliver(self, message: CoreMessage) -> None:
        while not self._slots.acquire(timeout=1.0):
            if self._is_closed:
                raise EngineDeadError("the client went away")
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._receive, message)
        except RuntimeError:  # the event loop was closed without a shutdown
            raise EngineDeadError("the client's event loop is closed") from None

    def _receive(self, message: CoreMessage) -> None:
        self._slots.release()
        self._on_message(message)

    def open(self, requests: Sequence[AddRequest], *, n: int = 1) -> OutputStream:
        stream = self._new_stream(requests)
        for request in requests:
            self._send(request)
            self._note_sent(request, stream, n)
        return stream

    def _send(self, message: ClientMessage) -> None:
        if self._thread is None:
            raise EngineDeadError("the engine was not started: await ready() first")
        self._inbox.put(message)

    async def _close_transport(self, timeout_s: float) -> None:
        self._is_closed = True
        if self._thread is not None and self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, timeout_s)
