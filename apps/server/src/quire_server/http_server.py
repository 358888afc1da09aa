"""The HTTP server around the app: uvicorn, set up for long streams and an orderly end. Knows no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from quire_server.app import make_app
from quire_server.context import ServerContext

__all__ = ["HTTPServer", "make_http_server"]


class HTTPServer(uvicorn.Server):
    """Leaves signals to the caller: uvicorn's own handling would end the process by signal, not with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(context: ServerContext) -> HTTPServer:
    """All routes of one served engine. Set `should_exit` to stop listening and let running requests finish."""
    config = context.config
    return HTTPServer(
        uvicorn.Config(
            make_app(context),
            http="httptools",
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
