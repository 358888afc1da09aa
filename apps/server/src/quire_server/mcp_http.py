"""HTTP as MCP servers are asked by it: what is too long is read no further. Needs the package `mcp`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2  # what the package mcp speaks HTTP with

__all__ = ["bounded_client"]

_EVENT_ENDS = (b"\n\n", b"\r\r", b"\n\r\n")
_MAX_END_BYTES = 2
"""Bytes of an event's end that may stand in one part while the rest is in the next."""


def bounded_client(
    headers: dict[str, str] | None, timeout_s: float, max_bytes: int, *, reads_events: bool = False
) -> httpx2.AsyncClient:
    """A client that reads at most so many bytes of an answer.

    Args:
        headers: Of each request.
        timeout_s: For everything but the time that an answer takes, which MCP's own client bounds.
        max_bytes: Of an answer; of a stream of events, of each event.
        reads_events: Whether answers come as events of one long stream, as in the older transport. Else none is opened:
            nothing that a server says unasked is used here.
    """
    timeout = httpx2.Timeout(timeout_s, read=None)
    transport = _BoundedTransport(max_bytes, reads_events=reads_events)
    return httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport)


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, max_bytes: int, *, reads_events: bool) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._reads_events = reads_events

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        is_stream = request.method == "GET" and "last-event-id" not in request.headers
        if is_stream and not self._reads_events:
            return httpx2.Response(405, request=request)
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, self._max_bytes, by_event=is_stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int, *, by_event: bool) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._by_event = by_event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes, end = 0, b""
        async for part in self._stream:
            num_bytes += len(part)
            if self._by_event:
                end += part
                if (place := max(map(end.rfind, _EVENT_ENDS))) >= 0:
                    num_bytes = len(end) - place
                end = end[-_MAX_END_BYTES:]
            if num_bytes > self._max_bytes:
                raise httpx2.ReadError(f"the answer has more than the {self._max_bytes} bytes that are read")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
