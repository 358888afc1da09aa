"""One HTTP connection: uvicorn's protocol with bounds on what a client may send, hold and leave unread.

Bytes are counted before they are parsed, and every wait has an end, so that a client without a key costs next to
nothing. Refusals are JSON, as all errors are. Knows no route but those of health checks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire_server.config import ServerConfig
from quire_server.connections import Connections
from quire_server.errors import HTTPError, error_response
from quire_server.guard import PUBLIC_PATHS
from quire_server.websocket_protocol import WebSocketProtocol

__all__ = ["HTTPLimits", "HTTPProtocol"]

PIECE_BYTES = 1 << 14
"""Bytes that are parsed between two looks at the counts."""

MAX_PIPELINED = 16
"""Requests that one connection may send ahead of their answers; it is closed after the last of them."""

LINGER_S = 10.0
"""How long the rest of a request is read, and thrown away, after its answer: a connection that is closed with unread
data is reset, and its client may lose the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPLimits:
    """What all connections of a server share."""

    config: ServerConfig
    connections: Connections


class HTTPProtocol(HttpToolsProtocol):
    """uvicorn's, bounded; and HTTP/1.0 clients, which know no chunks, get streams as they are."""

    def __init__(self, limits: HTTPLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._config, self._connections = limits.config, limits.connections
        self.url = b""
        self._is_over_limit = False
        self._is_ended = False
        """What still comes is thrown away: the connection was refused, or has sent its last request."""
        self._is_in_message = False
        self._is_in_head = True
        self._head_bytes = 0
        """Of the head so far, in whole fields."""
        self._framing_bytes = 0
        """Received since the last head or message ended, without bodies: the next head, chunk sizes, trailers."""
        self._body_bytes = 0
        """Of the message's body so far."""
        self._piece_body_bytes = 0
        """Bodies in the piece that is being parsed."""
        self._working: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last one that was read."""
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        has_room = self._connections.opened(transport)
        self._is_over_limit = self._connections.is_over_limit
        if has_room:
            self._wait_for_head()
        else:
            self._refuse(_too_many_connections(), lingers=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self.transport)
        self._stop_read_timer()
        self._stop_send_timer()
        self._unset_keepalive_if_required()
        self._end_requests()  # of which uvicorn tells the last one alone
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_send_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_send_timer()

    # What is read

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            return
        self._unset_keepalive_if_required()
        for start in range(0, len(data), PIECE_BYTES):
            self._parse(data[start : start + PIECE_BYTES])
            if self._is_ended or self.transport.is_closing():
                return
        if self._is_in_head and self._framing_bytes and self._read_timer is None and not self._is_working:
            self._wait_for_head()

    def _parse(self, piece: bytes) -> None:
        self._framing_bytes += len(piece)
        self._piece_body_bytes = 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(piece[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            if not self._is_ended:
                self._refuse(_bad_request(str(error)))
            return
        if self._is_ended:
            return
        self._framing_bytes = max(0, self._framing_bytes - self._piece_body_bytes)
        allowed = self._config.h11_max_incomplete_event_size
        if self._is_in_head and self._framing_bytes > allowed:
            self._refuse(self._head_too_large())
        elif not self._is_in_head and self._framing_bytes > allowed + self._body_bytes // 8:
            self._refuse(_bad_request("the sizes and extensions of its chunks are larger than the body"))

    def on_message_begin(self) -> None:
        if self._is_ended:
            return
        super().on_message_begin()
        self._is_in_message = self._is_in_head = True
        self._head_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_ended:
            super().on_url(url)
            self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_ended or not self._is_in_head:  # trailers are not headers
            return
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) > self._config.h11_max_header_count and not self._is_ended:
            count = self._config.h11_max_header_count
            self._refuse(_head_error(431, f"there are more than {count} headers (--h11-max-header-count)"))

    def on_headers_complete(self) -> None:
        if self._is_ended:
            return
        self._is_in_head = False
        self._framing_bytes = 0
        fault = self._framing_fault()
        if fault is not None:
            self._refuse(_bad_request(fault))
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self.pipeline[0][0].keep_alive = False
            self._is_ended = True
            return
        if self.parser.should_upgrade():
            return  # `_upgrade` follows
        self._stop_read_timer()
        self._begin()

    def _begin(self) -> None:
        self._connections.works(self.transport)
        app = self.app
        if self._is_over_limit:
            self.app = _OverLimit(app)
        super().on_headers_complete()
        self.app = app
        self.cycle.transport = _CycleTransport(self)  # type: ignore[assignment]
        if self._is_over_limit:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            # uvicorn offers no other place between the application and the connection.
            self.cycle.send = _UnchunkedSend(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        if self._is_ended:
            return
        self._body_bytes += len(body)
        self._piece_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_ended or self.parser.should_upgrade():
            return
        self._is_in_message = False
        self._is_in_head = True
        self._framing_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete:  # the rest of a body that nobody wanted is gone
            self._stop_read_timer()
            self._keep_alive()

    def _framing_fault(self) -> str | None:
        """What makes it uncertain where this request ends, or which one it is; proxies may read it otherwise."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return f"HTTP/{version} is not spoken here; send HTTP/1.1"
        names = [name for name, _ in self.headers]
        if b"transfer-encoding" in names:
            encodings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
            if encodings != [b"chunked"] or version == "1.0":
                return "Transfer-Encoding can only be chunked, with HTTP/1.1"
        if names.count(b"host") > 1:
            return "there is more than one Host header"
        if self.parser.get_method() == b"CONNECT":
            return "CONNECT is for proxies, which this server is none"
        return None

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._config.h11_max_incomplete_event_size and not self._is_ended:
            self._refuse(self._head_too_large())

    def _head_too_large(self) -> HTTPError:
        allowed = self._config.h11_max_incomplete_event_size
        what = f"larger than {allowed} bytes (--h11-max-incomplete-event-size)"
        if len(self.url) > allowed:
            return _head_error(414, f"the request's address is {what}")
        return _head_error(431, f"the request's headers are {what}")

    def _upgrade(self, rest: bytes) -> None:
        """To a websocket; other offers are passed over, as HTTP allows: clients that would like to speak HTTP/2 send
        one with their first request."""
        if self._is_ended:
            return
        if self._should_upgrade():
            if self._is_over_limit or self._is_working:
                self._refuse(_too_many_connections() if self._is_over_limit else _bad_request("an answer is pending"))
                return
            self._stop_read_timer()
            self._connections.works(self.transport)
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self.handle_websocket_upgrade()
            self._is_ended = True
            websocket = self.transport.get_protocol()
            if isinstance(websocket, WebSocketProtocol) and not websocket.handshake_initiated:
                # Its parser has bounds of its own, and says nothing of what is beyond them.
                self._refuse(_head_error(431, "a header is larger than a websocket's may be"), lingers=False)
            return
        version, method = self.parser.get_http_version().encode(), self.parser.get_method()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        if rest and not self._is_ended:
            self._parse(rest)

    # What is written

    @property
    def _is_working(self) -> bool:
        return self._working is not None and not self._working.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._working = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_working:  # a pipelined request was begun
            return
        if self._is_ended or self._is_in_message:
            self._unset_keepalive_if_required()
        if not self._is_ended:
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Between two requests, or between an answer and the end of its request."""
        self._connections.waits(self.transport)
        if self._is_in_message and not self._is_in_head:
            self._start_read_timer(LINGER_S, self._close)
        elif self._is_in_message:
            self._wait_for_head()
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self, error: HTTPError, *, lingers: bool = True) -> None:
        """Answer with an error if there is still a place for one, and close the connection."""
        self._is_ended = True
        self._unset_keepalive_if_required()
        has_place = not self._is_working or (self._working is self.cycle and not self.cycle.response_started)
        self._end_requests()
        if has_place:
            response = error_response(error, {"type": "http", "path": self.url.partition(b"?")[0].decode("latin-1")})
            fields = [*self.server_state.default_headers, *response.raw_headers]
            if "connection" not in response.headers:
                fields.append((b"connection", b"close"))
            head = STATUS_LINE[response.status_code] + b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(head + b"\r\n" + bytes(response.body))
        if has_place and lingers:
            self._linger()
        else:
            self._close()

    def end(self) -> None:
        """Close the connection after the last answer."""
        if self._is_in_message and not self.transport.is_closing():
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        self._is_ended = True
        self._end_requests()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._connections.waits(self.transport)
        self._start_read_timer(LINGER_S, self._close)

    def _end_requests(self) -> None:
        for cycle in (self._working, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def eof_received(self) -> None:
        if self._is_ended:
            self._close()

    def _close(self) -> None:
        self.transport.close()
        self._start_send_timer()

    # Waits

    def _wait_for_head(self) -> None:
        self._start_read_timer(self._config.header_timeout_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._read_timer = None
        if not self._is_in_message:
            self._close()
            return
        timeout_s = self._config.header_timeout_s
        self._refuse(
            HTTPError(408, f"the headers did not arrive within {timeout_s:g} s (--header-timeout-s)", code="timeout")
        )

    def _start_read_timer(self, delay_s: float, action: Any) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(delay_s, action)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _start_send_timer(self) -> None:
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._config.send_timeout_s, self.transport.abort)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


class _OverLimit:
    """The application on a connection of the reserve: health checks alone are answered."""

    def __init__(self, app: Any) -> None:
        self._app: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
        else:
            await error_response(_too_many_connections(), scope)(scope, receive, send)


def _too_many_connections() -> HTTPError:
    return HTTPError(
        503,
        "too many connections are open (--limit-concurrency); try again, or share connections between requests",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )


def _bad_request(fault: str) -> HTTPError:
    return HTTPError(400, f"this is no valid HTTP request: {fault}", code="invalid_http")


def _head_error(status: int, message: str) -> HTTPError:
    return HTTPError(status, message, code="headers_too_large")


class _CycleTransport:
    """A connection as its requests see it, which close it without a thought for what still comes."""

    def __init__(self, protocol: HTTPProtocol) -> None:
        self._transport = protocol.transport
        self.write, self.is_closing, self.close = self._transport.write, self._transport.is_closing, protocol.end


class _UnchunkedSend:
    """`send` for a client of HTTP/1.0: the end of the connection is the end of the body."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send_start = cycle.send

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = cycle.keep_alive = False
            await self._send_start(message)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if cycle.scope["method"] != "HEAD":
            cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()
