"""HTTP as MCP servers are asked by it: an answer that is too long is read no further. Needs the package `mcp`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2  # what the package mcp speaks HTTP with

__all__ = ["bounded_client"]


def bounded_client(headers: dict[str, str], timeout_s: float, max_answer_bytes: int) -> httpx2.AsyncClient:
    """A client that reads at most so many bytes of the answer to a message."""
    timeout = httpx2.Timeout(timeout_s, read=None)  # MCP's own client bounds how long an answer may take
    return httpx2.AsyncClient(headers=headers, timeout=timeout, transport=_BoundedTransport(max_answer_bytes))


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, max_answer_bytes: int) -> None:
        super().__init__()
        self._max_answer_bytes = max_answer_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method == "POST":  # a GET stands open for whatever the server has to say, message by message
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _BoundedStream(response.stream, self._max_answer_bytes)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise httpx2.ReadError(f"the answer has more than the {self._max_bytes} bytes that are read")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
