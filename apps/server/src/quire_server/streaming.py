"""Server-sent events as an ASGI response that stops its source as soon as the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire_interfaces import QuireError
from quire_server.errors import error_body
from quire_server.responses import sse

__all__ = ["DONE", "EventStream", "after", "merge"]

DONE = b"data: [DONE]\n\n"
_logger = logging.getLogger(__name__)

Element = TypeVar("Element")


class EventStream(Response):
    """Writes what `events` yields, one write per element, then the end.

    Args:
        events: Encoded events; closed early when the client disconnects, which aborts the requests behind it.
        end: What ends the stream: `[DONE]` in OpenAI's older APIs.
        watches: Whether to look for the client's leaving; off where the events themselves come from its body.
        on_error: The last event of a stream that fails, in the form its clients know.
        media_type: What the events are.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        end: bytes = DONE,
        on_error: Callable[[BaseException], bytes] = lambda error: sse(error_body(error)),
        watches: bool = True,
        media_type: str | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._on_error = on_error
        self._watches = watches

    @classmethod
    async def begin(cls, events: AsyncGenerator[bytes, None], **arguments: Any) -> EventStream:
        """The response, once its first event is there: what fails before it still has a status of its own."""
        return cls(after(await anext(events), events), **arguments)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(self._watch(receive) if self._watches else asyncio.Event().wait())
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (pump, watch):
                task.cancel()
            results = await asyncio.gather(pump, watch, return_exceptions=True)
            # A pump that was cancelled before its first step has not entered its own cleanup.
            with contextlib.suppress(RuntimeError):
                await self._events.aclose()
        if isinstance(results[0], Exception):
            raise results[0]

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                # The status line is out: the error becomes the last event, in the form clients know.
                if not isinstance(error, QuireError):
                    _logger.exception("a stream failed")
                await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    @staticmethod
    async def _watch(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


async def after(first: Element, rest: AsyncGenerator[Element, None]) -> AsyncGenerator[Element, None]:
    """`first`, then `rest`. Closing it closes `rest`."""
    try:
        yield first
        async for element in rest:
            yield element
    finally:
        await rest.aclose()


async def merge(sources: Sequence[AsyncGenerator[Element, None]]) -> AsyncGenerator[tuple[int, Element], None]:
    """(index of the source, element) in order of arrival. Closing it closes all sources."""
    arrived: asyncio.Queue[tuple[int, Element] | Exception | None] = asyncio.Queue(maxsize=2 * len(sources))

    async def read(index: int, source: AsyncGenerator[Element, None]) -> None:
        try:
            async for element in source:
                await arrived.put((index, element))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    readers = [asyncio.ensure_future(read(index, source)) for index, source in enumerate(sources)]
    try:
        num_left = len(readers)
        while num_left:
            item = await arrived.get()
            if item is None:
                num_left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for source in sources:
            await source.aclose()
