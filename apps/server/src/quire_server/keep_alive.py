"""The ASGI layer of `--sse-keep-alive-interval`: comments in streams that are silent.

Proxies close a connection that brings nothing for a while, also one whose request only waits for its turn. Clients of
server-sent events pass comments over. Knows no engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["KeepAlive", "await_stream"]

COMMENT = b": keep-alive\n\n"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")
"""Ends of paths whose streams are server-sent events: these may begin before there is anything to tell."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_current: ContextVar[_Answer | None] = ContextVar("current_answer", default=None)


def await_stream() -> None:
    """Say that the request which this task answers asks for a stream. Without effect where nothing is kept alive."""
    if (answer := _current.get()) is not None:
        answer.is_awaited = True


class KeepAlive:
    """Wraps the routes.

    Args:
        app: The routes.
        interval_s: Longest silence of a stream, in seconds.
    """

    def __init__(self, app: ASGIApp, interval_s: float) -> None:
        self._app, self._interval_s = app, interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "GET"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, scope["path"])
        token = _current.set(answer)
        beat = asyncio.ensure_future(answer.beat(self._interval_s))
        try:
            await self._app(scope, receive, answer.send)
        finally:
            _current.reset(token)
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)


class _Answer:
    """An answer on its way, and its silences."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._turn = asyncio.Lock()
        self._told_s = time.monotonic()
        self._kind = ""
        """Content type; empty before the status line."""
        self._has_ended = False
        self._is_early = False
        """The status line went out before the route said any."""
        self._refusal: bytearray | None = None
        """What the route answers in place of a stream, after an early status line."""
        self.is_awaited = False
        """Whether the request asks for a stream."""

    async def send(self, message: Message) -> None:
        """Pass on what the route says."""
        async with self._turn:
            self._told_s = time.monotonic()
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                kind = headers.get(b"content-type", b"").decode("latin-1")
                if self._is_early:
                    self._refusal = None if kind.startswith("text/event-stream") else bytearray()
                    return
                self._kind = kind or "none"
            elif self._refusal is not None:
                self._refusal += message.get("body", b"")
                if message.get("more_body", False):
                    return
                message = {"type": "http.response.body", "body": _as_events(self._path, bytes(self._refusal))}
            self._has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)

    async def beat(self, interval_s: float) -> None:
        """Break silences, until the answer has ended or is no stream."""
        while not self._has_ended:
            await asyncio.sleep(max(self._told_s + interval_s - time.monotonic(), 0.001))
            async with self._turn:
                if self._has_ended or (self._kind and not self._kind.startswith("text/event-stream")):
                    return
                if time.monotonic() < self._told_s + interval_s:
                    continue
                self._told_s = time.monotonic()
                if not self._kind:
                    if not (self.is_awaited and self._path.endswith(PATHS)):
                        continue
                    self._is_early, self._kind = True, "text/event-stream"
                    await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})


def _as_events(path: str, body: bytes) -> bytes:
    """An error's body as the end of a stream, in the form that the clients of the path know."""
    text = body.decode("utf-8", "replace").replace("\r", "").replace("\n", " ")
    if path.endswith("/v1/messages"):
        return f"event: error\ndata: {text}\n\n".encode()
    if not path.endswith("/v1/responses"):
        return f"data: {text}\n\ndata: [DONE]\n\n".encode()
    try:
        error: dict[str, Any] = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": text}
    told = {name: error.get(name) for name in ("code", "message", "param")}
    event = json.dumps({"type": "error", "sequence_number": 0, **told})
    return f"event: error\ndata: {event}\n\n".encode()
