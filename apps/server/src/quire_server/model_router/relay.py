"""A request passed on to a server on a unix socket, its answer passed back as it comes. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import httptools
from starlette.types import Receive, Scope, Send

from quire_server.errors import HTTPError

__all__ = ["relay"]

CHUNK_BYTES = 1 << 16
HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"})
"""Belong to one connection (RFC 9110, section 7.6.1)."""
_CHECKED_HEADERS = frozenset({b"host", b"origin", b"referer", b"content-length", b"expect"})
"""Of the request, looked at by the router or written anew."""


class _Answer:
    """Collects what the parser finds."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_begun = self.is_complete = False
        self.pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_begun = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def relay(scope: Scope, body: bytes, socket_path: Path, receive: Receive, send: Send) -> None:
    """Pass a request on, and its answer back, piece by piece. A client that leaves ends the other connection, which
    aborts the request behind it.

    Args:
        scope: Of the request.
        body: Its whole body.
        socket_path: Where the server listens.
        receive: Tells when the client leaves.
        send: Takes the answer.

    Raises:
        HTTPError: 502, the server is gone before it has answered.
    """
    reader, writer = await _connection(socket_path)
    try:
        writer.write(_request(scope, body))
        await writer.drain()
        passing = asyncio.ensure_future(_pass_back(reader, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)
    except (ConnectionError, httptools.HttpParserError):
        raise HTTPError(502, "the model's server is gone; try again", code="model_gone") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _connection(socket_path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_unix_connection(str(socket_path))
    except OSError:
        raise HTTPError(502, "the model's server is gone; try again", code="model_gone") from None


def _request(scope: Scope, body: bytes) -> bytes:
    path = scope.get("raw_path") or scope["path"].encode()
    root = scope.get("root_path", "").encode()
    target = path.removeprefix(root) + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in HOP_HEADERS and name not in _CHECKED_HEADERS and not name.startswith(b"sec-fetch-")
    ]
    request_id = scope.get("state", {}).get("request_id")
    if request_id:
        headers = [(name, value) for name, value in headers if name != b"x-request-id"]
        headers.append((b"x-request-id", request_id.encode("latin-1", "replace")))
    headers += [(b"host", b"localhost"), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (scope["method"].encode(), target, _lines(headers), body)


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


async def _pass_back(reader: asyncio.StreamReader, send: Send) -> None:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    is_begun = False
    async for data in _pieces(reader):
        parser.feed_data(data)
        if answer.is_begun and not is_begun:
            is_begun = True
            headers = [(name, value) for name, value in answer.headers if name not in HOP_HEADERS]
            await send({"type": "http.response.start", "status": parser.get_status_code(), "headers": headers})
        if answer.pieces:
            body, answer.pieces = b"".join(answer.pieces), []
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if answer.is_complete:
            break
    if not is_begun:
        raise ConnectionError("no answer")
    # An answer that broke off is not given a proper end: its client must notice.
    if not answer.is_complete and not any(name == b"content-length" for name, _ in answer.headers):
        raise _BrokenOffError
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _BrokenOffError(Exception):
    """The server died in the middle of an answer."""


async def _pieces(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while data := await reader.read(CHUNK_BYTES):
        yield data


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
