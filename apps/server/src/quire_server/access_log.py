"""The ASGI layer around all others: a line in the log for each request once it is answered.

Says who asked for what, how it went, how long it took and what it cost in tokens. Never shows a query, which may hold a
key, and no text of a request or an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_observability import RequestTimes, current_requests

__all__ = ["AccessLog"]

_logger = logging.getLogger("quire_server.access")

PROBES = ("/health", "/ping", "/ready", "/metrics", "/HealthCheck")
"""Ends of paths that are asked for every few seconds by machines."""
MAX_PATH_CHARS = 200
CLIENT_GONE = 499


class AccessLog:
    """Wraps the whole app.

    Args:
        app: It.
        silent_paths: Paths, without a prefix of a proxy, whose requests are not logged.
    """

    def __init__(self, app: ASGIApp, silent_paths: Iterable[str] = ()) -> None:
        self._app, self._silent_paths = app, frozenset(silent_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket") or path in self._silent_paths:
            await self._app(scope, receive, send)
            return
        start_s = time.monotonic()
        requests = current_requests.get()  # of a layer around this one
        if requests is None:
            requests = []
            current_requests.set(requests)
        status = 101 if scope["type"] == "websocket" else CLIENT_GONE

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except Exception:
            status = 500
            raise
        finally:
            _log_request(scope, status, time.monotonic() - start_s, requests)


def _log_request(scope: Scope, status: int, seconds: float, requests: list[RequestTimes]) -> None:
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~")[:MAX_PATH_CHARS]  # unprintable characters could forge a line
    level = logging.DEBUG if status < 400 and path.endswith(PROBES) else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    client = scope.get("client")
    fields: dict[str, Any] = {
        "client": client[0] if client else "",
        "method": scope.get("method", "WEBSOCKET"),
        "path": path,
        "status": status,
        "duration_ms": round(seconds * 1000, 1),
    }
    text = "{client} {method} {path} {status} {duration_ms:.1f} ms"
    if requests:
        # The n completions of a prompt are n requests of the engine, which reads the prompt once.
        fields["prompt_tokens"] = round(sum(each.num_prompt_tokens / each.n for each in requests))
        fields["generation_tokens"] = sum(each.num_generation_tokens for each in requests)
        text += ", {prompt_tokens} prompt tokens, {generation_tokens} generation tokens"
    _logger.log(level, text.format(**fields).lstrip(), extra=fields)
