"""The HTTP server around the app: uvicorn, set up for long streams and an orderly end. Knows no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire_server.app import make_app
from quire_server.context import ServerContext

__all__ = ["HTTPServer", "make_http_server"]


class HTTPServer(uvicorn.Server):
    """Leaves signals to the caller: uvicorn's own handling would end the process by signal, not with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HTTPProtocol(HttpToolsProtocol):
    """uvicorn's, but HTTP/1.0 clients, which know no chunks, get streams as they are."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        if self.scope["http_version"] == "1.0" and cycle is not None and cycle.scope is self.scope:
            # uvicorn offers no other place between the application and the connection.
            cycle.send = _UnchunkedSend(cycle)  # type: ignore[method-assign]


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


def make_http_server(context: ServerContext) -> HTTPServer:
    """All routes of one served engine. Set `should_exit` to stop listening and let running requests finish."""
    config = context.config
    return HTTPServer(
        uvicorn.Config(
            make_app(context),
            http=HTTPProtocol,
            ws="websockets-sansio",
            ws_max_size=config.max_body_bytes,
            lifespan="off",
            log_level=config.uvicorn_log_level,
            access_log=config.access_log,
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=config.ssl_cert_reqs,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(context.llm.config.engine.shutdown_timeout_s)),
        )
    )
