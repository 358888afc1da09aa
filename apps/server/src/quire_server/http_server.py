"""The HTTP server around the app: uvicorn, set up for long streams and an orderly end. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire_server.app import make_app
from quire_server.certificates import refresh_certificate
from quire_server.config import ServerConfig
from quire_server.connections import Connections, connection_limit
from quire_server.context import ServerContext
from quire_server.http_protocol import HTTPLimits, HTTPProtocol
from quire_server.websocket_protocol import WebSocketProtocol

__all__ = ["ABORT_GRACE_S", "HTTPServer", "http_server_of", "make_http_server"]

ABORT_GRACE_S = 5.0
"""When running requests were ended for want of time, how long their clients get to read the end."""


class HTTPServer(uvicorn.Server):
    """Leaves signals to the caller: uvicorn's own handling would end the process by signal, not with status 0."""

    background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """What runs beside the requests."""
    refreshes_certificate = False
    """Whether the certificate is read again when its files change."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [asyncio.ensure_future(run()) for run in self.background]
        if self.refreshes_certificate:
            tasks.append(asyncio.ensure_future(refresh_certificate(self.config)))
        try:
            await super().serve(sockets)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def make_http_server(context: ServerContext) -> HTTPServer:
    """All routes of one served engine. Set `should_exit` to stop listening and let running requests finish."""
    server = http_server_of(make_app(context), context.config, context.llm.config.engine.shutdown_timeout_s)
    server.background = context.state.background
    return server


def http_server_of(app: ASGIApp, config: ServerConfig, shutdown_timeout_s: float) -> HTTPServer:
    """The server of an app.

    Args:
        app: All of its routes.
        config: Addresses and bounds.
        shutdown_timeout_s: How long running requests have when it stops.
    """
    connections = Connections(connection_limit(config.limit_concurrency))
    http = functools.partial(HTTPProtocol, HTTPLimits(config=config, connections=connections))
    websocket = functools.partial(WebSocketProtocol, connections, config.send_timeout_s)
    server = HTTPServer(
        uvicorn.Config(
            app,
            http=http,  # type: ignore[arg-type]
            ws=websocket,  # type: ignore[arg-type]
            ws_max_size=config.max_body_bytes,
            lifespan="off",
            log_config=None,
            log_level=config.uvicorn_log_level,
            access_log=False,  # it shows queries, which may hold a key: see AccessLog
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=config.ssl_cert_reqs,
            ssl_ciphers=config.ssl_ciphers or "TLSv1",  # uvicorn's default: what OpenSSL names so
            timeout_keep_alive=config.timeout_keep_alive,
            timeout_graceful_shutdown=math.ceil(shutdown_timeout_s + ABORT_GRACE_S),
        )
    )
    server.refreshes_certificate = config.enable_ssl_refresh
    return server
